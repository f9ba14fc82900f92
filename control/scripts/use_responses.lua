-- Another response builds upon these: they live as long as it does.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 life (ms)  3… rids
-- Returns how many of them there are.
--@keys zset hash
--@arguments word positive word…
--@include clock
--@include stored
local records, life = ARGV[1], tonumber(ARGV[2])
local now, found = server_ms(), 0
for i = 3, #ARGV do
  if redis.call('PEXPIRE', records .. ARGV[i], whole(life)) == 1 then
    redis.call('ZADD', KEYS[1], 'XX', whole(now + life), ARGV[i])
    found = found + 1
  end
end
if found > 0 then
  stored(KEYS[1], KEYS[2], records).outlive(life)
end
return found
