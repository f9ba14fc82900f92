-- Take a replica's lock if it is free, and begin a new epoch.
-- KEYS 1 lock (string `owner:epoch`)  2 epoch (string)  3 poison (hash)
-- ARGV 1 owner, unique to the process  2 the replica's base key  3 world size (int)
--      4 floor (int): the caller's last epoch, 0 if none  5 the model's base key
-- Returns the epoch, or false while somebody else holds the lock.
--@keys string string hash
--@arguments word prefix positive count base
--@model load
--@include clock
--@include server
local owner, base, world, floor = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local holder = redis.call('GET', KEYS[1])
if holder then
  local holding, held = string.match(holder, '^(.*):(%d+)$')
  -- The same call again, its reply having been lost.
  if holding == owner and tonumber(held) > floor then
    return tonumber(held)
  end
  return false
end

local last = tonumber(redis.call('GET', KEYS[2]) or '0')
-- The server's milliseconds keep it growing when a flush or a failover has taken the last epoch away.
local epoch = math.max(last + 1, floor + 1, server_ms())
for _, old in ipairs({last, floor}) do
  redis.call('UNLINK', base .. 'reply:' .. whole(old))
  for rank = 1, world - 1 do
    redis.call('UNLINK', base .. 'cmd:' .. whole(old) .. ':' .. rank)
  end
end
redis.call('UNLINK', KEYS[3], base .. 'claim')
redis.call('SET', KEYS[2], whole(epoch))
redis.call('SET', KEYS[1], owner .. ':' .. whole(epoch), 'PX', LOCK_MS)
redis.call('SET', base .. 'server', server_run(), 'PX', COMMAND_MS)
redis.call('HINCRBY', ARGV[5] .. 'load', 'epochs', 1)
return epoch
