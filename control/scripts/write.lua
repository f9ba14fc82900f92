-- One plain command on one key, for what must be written although the server is beyond its maxmemory: heartbeats, states.
-- KEYS 1 the command's key
-- ARGV 1 HSET, PEXPIRE, SADD, SET or XADD  2… the command's other words
-- Returns the command's answer.
--@keys any
--@arguments HSET|PEXPIRE|SADD|SET|XADD name text…
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
