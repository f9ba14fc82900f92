-- Hands out what is to be looked after now; each goes to one caller at a time.
-- KEYS 1 what is looked after (zset name → ms)
-- ARGV 1 at most so many (int)
-- Returns their names.
--@keys zset
--@arguments positive
--@include clock
local now = server_ms()
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now), 'LIMIT', 0, ARGV[1])
for _, name in ipairs(due) do
  redis.call('ZADD', KEYS[1], whole(now + LOOK_AFTER_MS), name)
end
return due
