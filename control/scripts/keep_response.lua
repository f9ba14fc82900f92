-- A response that is to be stored was accepted; a repeat, or the same by an Idempotency-Key, changes nothing. Of an owner
-- that has no room left the oldest go, a batch at a time.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid  3 life (ms)  4 most bytes (int)  5 most responses (int)
--      6… its fields and their values
-- Returns 1 once it is kept, 0 while more must go before: call again.
--@include clock
--@include stored
local records, rid = ARGV[1], ARGV[2]
local life, bytes, number = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if not (life and life >= 1 and bytes and number and number >= 1) or #ARGV < 7 or #ARGV % 2 == 0 then
  return redis.error_reply('ERR keep_response: bad life, bounds or fields')
end
local size = RESPONSE_OVERHEAD
for i = 6, #ARGV do
  size = size + #ARGV[i]
end
if size > bytes then
  return redis.error_reply('ERR keep_response: larger than all that its owner may keep')
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
