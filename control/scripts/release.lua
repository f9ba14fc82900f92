-- Give the lock back, but only exactly this token's. A renewal that arrives late does not take it again.
-- KEYS 1 lock (string)  2 the run of the server that gave it (string)
-- ARGV 1 token `owner:epoch`
-- Returns 1 if it was held by the token, else 0.
--@keys string string
--@arguments token
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('UNLINK', KEYS[1], KEYS[2])
return 1
