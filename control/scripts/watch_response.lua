-- From now on an open response is looked after until it has ended.
-- KEYS 1 open responses (zset rid → ms)
-- ARGV 1 rid
-- Returns 1.
--@include clock
redis.call('ZADD', KEYS[1], 'NX', whole(server_ms() + LOOK_AFTER_MS), ARGV[1])
return 1
