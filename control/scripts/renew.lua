-- Keep the lock, and the epoch's command and reply streams, alive. A lock that ran out is taken again, and the epoch goes
-- on, where nothing can have happened meanwhile: nobody moved the epoch on (every acquisition and every takeover does), the
-- lock was not released, and the same run of the server still has the epoch's commands.
-- Else each outage of two seconds would begin an epoch, which computes every prompt anew. A longer lock would delay the
-- takeover of every dead leader. A server that refuses INFO to scripts ends the epoch.
-- KEYS 1 lock (string)  2 epoch (string)
-- ARGV 1 token `owner:epoch`  2 the replica's base key  3 world size (int)
-- Returns {'OK', 1 if it had run out, else 0}, {'LOST', why} or {'FENCED', why}.
--@keys string string
--@arguments token prefix positive
--@include fence
--@include server
local base, epoch = ARGV[2], epoch_of(ARGV[1])
local refused = fence(ARGV[1])
if refused then
  local run = redis.call('GET', base .. 'server')
  local resumes = refused[1] == 'LOST' and redis.call('GET', KEYS[2]) == epoch
  if not (resumes and run and run ~= '' and run == server_run()) then
    return refused
  end
  redis.call('SET', KEYS[1], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], LOCK_MS)
-- Ranks and views know the epoch by this key alone: one that was evicted or deleted comes back.
redis.call('SET', KEYS[2], epoch, 'NX')
redis.call('PEXPIRE', base .. 'server', COMMAND_MS)
redis.call('PEXPIRE', base .. 'reply:' .. epoch, COMMAND_MS)
for rank = 1, tonumber(ARGV[3]) - 1 do
  redis.call('PEXPIRE', base .. 'cmd:' .. epoch .. ':' .. rank, COMMAND_MS)
end
return {'OK', refused and 1 or 0}
