-- After a failover that lost the newest writes a log can be shorter than what a client was given: append a page of it.
-- KEYS 1 request (hash)  2 log (stream)
-- ARGV 1 the model's base key  2 rid  3 tenant  4 seq of the log's last entry as it was read (int)
--      5 entries without a token among these (int)  6 choices that end in these
--      7 how the request ends where all of its choices have, '' where it does not  8… entries (JSON)
-- Returns {'OK', seq of the last entry}, {'MOVED'} where the log is another one by now, or {'ABSENT'}.
-- It takes nothing from the leader: what an api has, a leader emitted. One that still has it in memory learns at its next
-- emit where the log is and goes on from there. A repeat finds the log moved.
--@keys hash stream
--@arguments base request:1 text count count choices finished|cancelled|expired| entry…
--@model load orphans settlements classes
--@include clock
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include repairing
check_request(ARGV[1], ARGV[2])
local base, rid, last = ARGV[1], ARGV[2], tonumber(ARGV[4])
local was = redis.call('HMGET', KEYS[1], 'state', 'tenant', 'seq', 'ended')
if not was[1] or was[2] ~= ARGV[3] then
  return {'ABSENT'}
end
if tonumber(was[3]) ~= last or (was[1] ~= 'queued' and was[1] ~= 'running') then
  return {'MOVED'}
end
for i = 8, #ARGV do
  last = last + 1
  redis.call('XADD', KEYS[2], whole(last) .. '-0', 'e', ARGV[i])
end
if #ARGV > 7 then
  local more = {}
  for choice in string.gmatch(ARGV[6], '%d+') do
    more[#more + 1] = choice
  end
  redis.call('HSET', KEYS[1], 'seq', whole(last), 'ended', with_ended(was[4] or '', more))
  redis.call('HINCRBY', KEYS[1], 'tokenless', ARGV[5])
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
end
close_if_whole(base, rid, ARGV[7], server_ms())
return {'OK', last}
