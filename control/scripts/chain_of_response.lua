-- The stored responses that one continues, and their bytes.
-- KEYS 1 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid  3 at most so many (int)
-- Returns {the rid to ask for next or '', rids from `rid` backwards, the bytes of each}. A record that is gone is the last.
--@keys hash
--@arguments word word positive
local records, rid, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
if most > 256 then
  refuse('argument 3', ARGV[3], 'at most 256')
end
local found, sizes = {}, {}
while rid ~= '' and #found < most do
  found[#found + 1] = rid
  sizes[#found] = tonumber(redis.call('HGET', KEYS[1], rid) or 0)
  rid = redis.call('HGET', records .. rid, 'previous') or ''
end
return {rid, found, sizes}
