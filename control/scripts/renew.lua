-- Keep the lock, and the epoch's command and reply streams, alive.
-- KEYS 1 lock (string)  2 epoch (string)
-- ARGV 1 token `owner:epoch`  2 the replica's base key  3 world size (int)
-- Returns {'OK'}, {'LOST', why} or {'FENCED', why}.
--@keys string string
--@arguments token prefix positive
--@include fence
local refused = fence(ARGV[1])
if refused then
  return refused
end
local base, epoch = ARGV[2], epoch_of(ARGV[1])
redis.call('PEXPIRE', KEYS[1], LOCK_MS)
redis.call('PEXPIRE', base .. 'reply:' .. epoch, COMMAND_MS)
for rank = 1, tonumber(ARGV[3]) - 1 do
  redis.call('PEXPIRE', base .. 'cmd:' .. epoch .. ':' .. rank, COMMAND_MS)
end
return {'OK'}
