-- A stored response has ended. The first to see it writes it: all of them read the same log. One that was deleted stays so.
-- How it is shown is part of the response, and no longer needed beside it.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid  3 life (ms)  4 most bytes (int)  5 most responses (int)
--      6 the response (JSON)  7 its token log (JSON), or ''
-- Returns the response as it is stored, or false if there is none. What is too much now goes here or in trim_responses.
--@keys zset hash
--@arguments word word positive count count name text
--@include clock
--@include stored
local records, rid = ARGV[1], ARGV[2]
local life, bytes, number = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local record, now = records .. rid, server_ms()
local was = redis.call('HMGET', record, 'tenant', 'response')
if not was[1] then
  return false
end
if was[2] then
  return was[2]
end
local size = tonumber(redis.call('HGET', KEYS[2], rid) or RESPONSE_OVERHEAD)
size = size + #ARGV[6] - redis.call('HSTRLEN', record, 'view')
redis.call('HSET', record, 'response', ARGV[6], 'view', '')
-- Parameters and tokens are for a replay, which needs both.
if redis.call('HEXISTS', record, 'params') == 1 then
  if ARGV[7] ~= '' and size + #ARGV[7] <= bytes then
    redis.call('HSET', record, 'entries', ARGV[7])
    size = size + #ARGV[7]
  else
    size = size - redis.call('HSTRLEN', record, 'params')
    redis.call('HDEL', record, 'params')
  end
end
local responses = stored(KEYS[1], KEYS[2], records)
responses.charge(rid, size, life, now)
responses.make_room(bytes, number, now)
return ARGV[6]
