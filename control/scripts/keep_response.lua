-- A response that is to be stored was accepted; a repeat, or the same by an Idempotency-Key, changes nothing. Of an owner
-- that has no room left the oldest go, a batch at a time.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid  3 life (ms)  4 most bytes (int)  5 most responses (int)
--      6… its fields and their values
-- Returns 1 once it is kept, 0 while more must go before: call again.
--@keys zset hash
--@arguments word word positive count positive text=text…
--@include clock
--@include stored
local records, rid = ARGV[1], ARGV[2]
local life, bytes, number = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local size = RESPONSE_OVERHEAD
for i = 6, #ARGV do
  size = size + #ARGV[i]
end
if size > bytes then
  refuse('the size of the response', whole(size), 'within the ' .. ARGV[4] .. ' bytes that its owner may keep')
end

local record, now = records .. rid, server_ms()
if redis.call('EXISTS', record) == 1 then
  return 1
end
local responses = stored(KEYS[1], KEYS[2], records)
if not responses.make_room(bytes - size, number - 1, now) then
  return 0
end
redis.call('HSET', record, unpack(ARGV, 6))
responses.charge(rid, size, life, now)
return 1
