-- A page of an owner's stored chat completions. Those whose record is gone leave the list.
-- KEYS 1 the list (zset rid → ms of creation)  2 index of the owner's records (zset)
-- ARGV 1 place of the first, from 0 (int)  2 most entries (int)  3 asc or desc
-- Returns {place of the next page or 0 at the end, rids}.
--@keys zset zset
--@arguments count positive word
local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local last = string.format('%d', first + most - 1)
local found
if ARGV[3] == 'desc' then
  found = redis.call('ZREVRANGE', KEYS[1], ARGV[1], last)
else
  found = redis.call('ZRANGE', KEYS[1], ARGV[1], last)
end
local here, gone = {}, 0
for _, rid in ipairs(found) do
  if redis.call('ZSCORE', KEYS[2], rid) then
    here[#here + 1] = rid
  else
    redis.call('ZREM', KEYS[1], rid)
    gone = gone + 1
  end
end
if #found < most then
  return {0, here}
end
return {first + most - gone, here}
