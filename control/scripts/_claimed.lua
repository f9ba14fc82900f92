-- Handing requests to a leader; needs queue, ending, delivered and weights.

-- What a leader gets of a request: everything it needs to begin or to go on. The log is empty for a fresh one.
local function describe(base, rid)
  local req = base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'params', 'tenant', 'priority', 'attempts', 'deadline', 'seq')
  local entries = {}
  if f[6] ~= '0' then
    for i, logged in ipairs(redis.call('XRANGE', base .. 'log:' .. rid, '-', '+')) do
      entries[i] = logged[2][2]
    end
  end
  return {rid, f[1], f[2], f[3], f[4], f[5], entries}
end

-- A leader takes over a request that has been delivered before, to `token` or to another epoch. False if it is over.
local function adopt(base, class, tenant, id, rid, token, weights, now)
  local req = base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'state', 'owner', 'cancel', 'deadline', 'entry')
  if (f[1] ~= 'running' and f[1] ~= 'queued') or f[5] ~= id then
    remove(base, class, tenant, id)
    return false
  end
  if f[3] == '1' then
    end_request(base, rid, 'cancelled', 'cancelled', 'cancelled', now)
    return false
  end
  if now >= tonumber(f[4]) then
    end_request(base, rid, 'expired', 'expired', 'deadline passed', now)
    return false
  end
  local others = other_weights(base, rid, weights)
  if others then
    pass_on(base, rid, others, now)
    return false
  end
  note_weights(base, rid, weights)
  -- Adopting twice in one epoch (a lost reply) is one attempt.
  if f[2] ~= token then
    redis.call('HSET', req, 'owner', token, 'state', 'running', 'replica', string.match(KEYS[1], ':([^:]+):lock$'))
    redis.call('HINCRBY', req, 'attempts', 1)
  end
  return true
end

-- Everything that was delivered to `consumer` and has not ended, room or not: somebody waits for it. What another
-- replica left is claimed for this one, except what began with other weights: its own replica may come back to it.
local function adopt_all(base, consumer, replica, token, weights, now, claimed)
  for _, left in ipairs(delivered_to(base, consumer)) do
    local class, tenant, id, rid = unpack(left)
    local stays = consumer ~= replica and other_weights(base, rid, weights)
    if consumer ~= replica and not stays then
      redis.call('XCLAIM', base .. 'queue:' .. class .. ':' .. tenant, GROUP, replica, 0, id, 'JUSTID')
    end
    if not stays and adopt(base, class, tenant, id, rid, token, weights, now) then
      claimed[#claimed + 1] = describe(base, rid)
    end
  end
end

-- What the claim with this id handed out, if this is that call again and its reply was lost; else nil.
local function repeated(base, token, last, call)
  local id, rids = string.match(redis.call('GET', last) or '', '^(%S+) ?(.*)$')
  if id ~= call then
    return nil
  end
  local again = {}
  for rid in string.gmatch(rids, '%S+') do
    local f = redis.call('HMGET', base .. 'req:' .. rid, 'owner', 'state')
    if f[1] == token and f[2] == 'running' then
      again[#again + 1] = describe(base, rid)
    end
  end
  return again
end

local function remember(last, call, claimed)
  if #claimed == 0 then
    return
  end
  local rids = {}
  for i, request in ipairs(claimed) do
    rids[i] = request[1]
  end
  redis.call('SET', last, call .. ' ' .. table.concat(rids, ' '), 'PX', COMMAND_MS)
end

local function last_bell(bell)
  local rung = redis.call('XREVRANGE', bell, '+', '-', 'COUNT', 1)
  return rung[1] and rung[1][1] or '0'
end
