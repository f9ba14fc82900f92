-- Putting a request that was delivered, or sits undelivered at a queue's head, back at the end of its queue; needs bell,
-- turns, running and queue. Its log stays, so whoever claims it goes on where it was.

local function put_back(base, rid)
  local req = base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'state', 'priority', 'tenant', 'entry', 'prompt_tokens', 'replica', 'n', 'deadline')
  local class, tenant, tokens = f[2], f[3], f[5]
  -- The new entry first: a stream that is never empty keeps its group and its tenant's turn.
  local entry = redis.call('XADD', base .. 'queue:' .. class .. ':' .. tenant, '*', 'rid', rid, 'tokens', tokens,
    'n', f[7])
  remove(base, class, tenant, f[4])
  if f[1] == 'running' then
    redis.call('ZREM', running_on(base, f[6]), place_of(rid, class, f[4], tenant))
    local ticket = count_in(base, rid, class, tenant, tonumber(tokens), tonumber(f[7]), tonumber(f[8]))
    redis.call('HSET', req, 'ticket', ticket)
    ring(base, 'requeue', rid)
  else
    redis.call('HINCRBY', base .. 'load', 'moved', 1) -- no count changes, but whoever counts the queue may miss it
  end
  redis.call('HDEL', req, 'suspect') -- suspicion belongs to the replica whose group it was in
  redis.call('HSET', req, 'state', 'queued', 'owner', '', 'entry', entry)
  begin_waiting(base, class, tenant)
end
