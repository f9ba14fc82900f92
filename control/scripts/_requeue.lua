-- A running request goes back into its queue, to be claimed by any replica; its log stays. Needs bell, turns and queue.
local function put_back(base, rid)
  local req, load = base .. 'req:' .. rid, base .. 'load'
  local f = redis.call('HMGET', req, 'priority', 'tenant', 'entry', 'prompt_tokens')
  local class, tenant, tokens = f[1], f[2], f[4]
  local queue = base .. 'queue:' .. class .. ':' .. tenant
  -- The new entry first: a stream that is never empty keeps its group and its tenant's turn.
  local entry = redis.call('XADD', queue, '*', 'rid', rid, 'tokens', tokens)
  remove(base, class, tenant, f[3])
  redis.call('HINCRBY', load, 'queued_tokens', tokens)
  redis.call('HINCRBY', load, 'enqueued', 1)
  local position = redis.call('HINCRBY', load, 'queued', 1)
  redis.call('HINCRBY', load, 'queued:' .. class, 1)
  local claimed = tonumber(redis.call('HGET', load, 'claimed') or '0')
  redis.call('HDEL', req, 'suspect') -- suspicion belongs to the replica whose group it was in
  redis.call('HSET', req, 'state', 'queued', 'owner', '', 'entry', entry, 'ticket', whole(claimed + position))
  begin_waiting(base, class, tenant)
  ring(base, 'requeue', rid)
end
