-- Build a token log beside the one that is in use, a page at a time; another script puts it in its place.
-- KEYS 1 staged log (stream)
-- ARGV 1 seq of the first entry (int)  2… entries (JSON)
-- Returns the seq up to which it has entries now. A repeat adds nothing, and neither does a page that leaves a gap.
--@keys stream
--@arguments positive entry…
--@include staged
local first, last = tonumber(ARGV[1]), last_seq(KEYS[1])
if last == first - 1 then
  for i = 2, #ARGV do
    last = last + 1
    redis.call('XADD', KEYS[1], string.format('%d-0', last), 'e', ARGV[i])
  end
end
redis.call('PEXPIRE', KEYS[1], STAGED_MS)
return last
