-- A rank says how far it is.
-- KEYS 1 heartbeat (hash)  2 epoch (string)
-- ARGV 1 the rank's epoch (int)  2… field, value, …
-- Returns {'OK'} or {'FENCED', why}.
--@keys hash string
--@arguments count text=text…
--@include clock
local epoch = redis.call('GET', KEYS[2])
if epoch and tonumber(epoch) > tonumber(ARGV[1]) then
  return {'FENCED', 'the epoch moved on to ' .. epoch .. ' from ' .. ARGV[1]}
end
local fields = {'HSET', KEYS[1], 'at', whole(server_ms())}
for i = 2, #ARGV do
  fields[i + 3] = ARGV[i]
end
redis.call(unpack(fields))
redis.call('PEXPIRE', KEYS[1], RANK_BEAT_MS)
return {'OK'}
