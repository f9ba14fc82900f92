-- Give the lock back, but only exactly this token's.
-- KEYS 1 lock (string)
-- ARGV 1 token `owner:epoch`
-- Returns 1 if it was held by the token, else 0.
--@keys string
--@arguments token
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('UNLINK', KEYS[1])
return 1
