-- A stored response has ended. Whoever is first writes it: all of them read the same log. One that was deleted stays so.
-- KEYS 1 response (hash)
-- ARGV 1 life (ms)  2 the response (JSON)
-- Returns the response as it is stored, or false if there is none.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return false
end
if redis.call('HSETNX', KEYS[1], 'response', ARGV[2]) == 1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return redis.call('HGET', KEYS[1], 'response')
