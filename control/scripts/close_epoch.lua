-- A leader that has lost its lock ends its epoch for the other ranks too, so that none of them waits for the others.
-- KEYS 1 lock (string)  2 epoch (string)
-- ARGV 1 token `owner:epoch`
-- Returns 1 if the epoch is over now, 0 while somebody holds the lock.
--@keys string string
--@arguments token
--@include clock
--@include fence
if redis.call('GET', KEYS[1]) then
  return 0
end
local mine = tonumber(epoch_of(ARGV[1]))
if tonumber(redis.call('GET', KEYS[2]) or '0') <= mine then
  redis.call('SET', KEYS[2], whole(mine + 1))
end
return 1
