-- A waiting request's place in the order of arrival.
-- KEYS 1 request (hash)  2 load (hash)
-- Returns the position from 1, or false when it does not wait.
--@keys hash hash
--@arguments
local f = redis.call('HMGET', KEYS[1], 'state', 'ticket')
if f[1] ~= 'queued' then
  return false
end
return math.max(1, tonumber(f[2]) - tonumber(redis.call('HGET', KEYS[2], 'claimed') or '0'))
