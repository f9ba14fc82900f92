-- A stored response has ended. Whoever is first writes it: all of them read the same log. One that was deleted stays so.
-- KEYS 1 response (hash)
-- ARGV 1 life (ms)  2 the response (JSON)
-- Returns the response as it is stored, or false if there is none.
local was = redis.call('HMGET', KEYS[1], 'tenant', 'response')
if not was[1] then
  return false
end
if was[2] then
  return was[2]
end
redis.call('HSET', KEYS[1], 'response', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return ARGV[2]
