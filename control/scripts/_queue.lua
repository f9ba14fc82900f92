-- Reading a queue with the consumer group, whatever a flush has taken away, and the counts of what waits; needs clock.

local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then
      return flat[i + 1]
    end
  end
  return nil
end

-- The id after which nothing has been delivered to any consumer. After a flush the stream may be back without its
-- group: it is made again, and nothing has been delivered then.
local function last_delivered(queue)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
    if field(group, 'name') == GROUP then
      return field(group, 'last-delivered-id')
    end
  end
  redis.call('XGROUP', 'CREATE', queue, GROUP, '0')
  return '0-0'
end

-- The oldest waiting entry as {id, fields}, or nil; delivers nothing.
local function peek(queue)
  if redis.call('EXISTS', queue) == 0 then
    return nil
  end
  return redis.call('XRANGE', queue, '(' .. last_delivered(queue), '+', 'COUNT', 1)[1]
end

-- Deliver the entry that peek showed to `consumer`.
local function take(queue, consumer)
  redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', queue, '>')
end

-- How many entries of a queue wait: those that no consumer has.
local function waiting_in(queue)
  if redis.call('EXISTS', queue) == 0 then
    return 0
  end
  local pending = 0 -- nothing is, where a flush has taken the group
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
    if field(group, 'name') == GROUP then
      pending = tonumber(field(group, 'pending'))
    end
  end
  return math.max(0, redis.call('XLEN', queue) - pending)
end

-- A tenant leaves with what it was served beyond the others' turn: it is no lower when it comes back soon.
local function remember_debt(base, class, tenant)
  local served = tonumber(redis.call('ZSCORE', base .. 'served:' .. class, tenant) or '0')
  if served > tonumber(redis.call('HGET', base .. 'load', 'turn:' .. class) or '0') then
    local debts = base .. 'debts:' .. class
    redis.call('ZADD', debts, string.format('%.0f', served), tenant)
    redis.call('PEXPIRE', debts, DEBT_MS)
  end
end

-- A tenant with nothing queued and nothing running has no turn.
local function end_turns(base, class, tenant)
  remember_debt(base, class, tenant)
  redis.call('ZREM', base .. 'turns:' .. class, tenant)
  redis.call('ZREM', base .. 'served:' .. class, tenant)
end

-- Take an entry out of the queue for good; the last one of a tenant takes the tenant's turn with it.
local function remove(base, class, tenant, id)
  local queue = base .. 'queue:' .. class .. ':' .. tenant
  redis.pcall('XACK', queue, GROUP, id)
  redis.call('XDEL', queue, id)
  if redis.call('XLEN', queue) == 0 then
    redis.call('UNLINK', queue)
    end_turns(base, class, tenant)
  end
end

-- The counts of what waits: requests and prompt tokens in all, requests and sequences by class in the load, and each
-- tenant's sequences in `waiting:<class>`. `change` is 1 or -1 request of `n` sequences; returns the requests in all.
local function count_waiting(base, class, tenant, tokens, n, change)
  local load = base .. 'load'
  redis.call('HINCRBY', load, 'queued:' .. class, change)
  redis.call('HINCRBY', load, 'sequences:' .. class, whole(change * n))
  redis.call('HINCRBY', load, 'queued_tokens', whole(change * tokens))
  if tonumber(redis.call('ZINCRBY', base .. 'waiting:' .. class, whole(change * n), tenant)) <= 0 then
    redis.call('ZREM', base .. 'waiting:' .. class, tenant)
  end
  return redis.call('HINCRBY', load, 'queued', change)
end

-- A request begins to wait until its deadline (ms): returns the ticket that its place in the order of arrival is told
-- from, and that place.
local function count_in(base, rid, class, tenant, tokens, n, deadline)
  redis.call('ZADD', base .. 'deadlines', whole(deadline), rid)
  redis.call('HINCRBY', base .. 'load', 'enqueued', 1)
  local position = count_waiting(base, class, tenant, tokens, n, 1)
  local claimed = tonumber(redis.call('HGET', base .. 'load', 'claimed') or '0')
  return whole(claimed + position), position
end

-- A waiting request leaves the queue, whichever way.
local function count_out(base, rid, class, tenant, tokens, n)
  redis.call('ZREM', base .. 'deadlines', rid)
  redis.call('HINCRBY', base .. 'load', 'claimed', 1)
  count_waiting(base, class, tenant, tokens, n, -1)
end
