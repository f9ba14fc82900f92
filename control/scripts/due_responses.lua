-- Hands out the open responses whose turn it is to be looked after; each goes to one caller at a time.
-- KEYS 1 open responses (zset rid → ms)
-- ARGV 1 at most so many (int)
-- Returns their rids.
--@include clock
local now = server_ms()
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now), 'LIMIT', 0, ARGV[1])
for _, rid in ipairs(due) do
  redis.call('ZADD', KEYS[1], whole(now + LOOK_AFTER_MS), rid)
end
return due
