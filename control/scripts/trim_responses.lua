-- Of one owner's stored responses, drop what has lapsed, and the oldest beyond the bounds.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 most bytes (int)  3 most responses (int)
-- Returns {1 once nothing is left to drop and 0 while there is, bytes, number}.
--@keys zset hash
--@arguments word count count
--@include clock
--@include stored
local bytes, number = tonumber(ARGV[2]), tonumber(ARGV[3])
local responses, now = stored(KEYS[1], KEYS[2], ARGV[1]), server_ms()
local within = responses.make_room(bytes, number, now)
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if oldest[2] and tonumber(oldest[2]) <= now then
  within = false
end
local total, count = responses.counted()
return {within and 1 or 0, total, count}
