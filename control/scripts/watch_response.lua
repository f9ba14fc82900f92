-- From now on this is looked after in its turn: an open response until it has ended, or an owner of stored ones.
-- KEYS 1 what is looked after (zset name → ms)
-- ARGV 1 its name
-- Returns 1.
--@keys zset
--@arguments name
--@include clock
redis.call('ZADD', KEYS[1], 'NX', whole(server_ms() + LOOK_AFTER_MS), ARGV[1])
return 1
