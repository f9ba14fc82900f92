-- A response that is to be stored was accepted; a repeat, or the same by an Idempotency-Key, changes nothing.
-- KEYS 1 response (hash)
-- ARGV 1 life (ms)  2… its fields and their values
-- Returns 1.
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
