-- Fair order between tenants; needs clock. `served:<class>` counts the virtual tokens of every tenant that has something
-- queued or running; `turns:<class>` holds the same count for those that have something waiting, lowest first. The
-- field `turn:<class>` of the load is the count of the tenant whose turn came last. Nobody begins to wait below it, so
-- neither an idle past nor what others were served while nobody waited counts for anything. `debts:<class>` is what
-- tenants without any request were served beyond it, for a while.

-- Debts below the turn change nothing. Each request that begins to wait forgets more of them than it can leave.
local function forget_debts(debts, turn)
  local past = redis.call('ZRANGEBYSCORE', debts, '-inf', turn, 'LIMIT', 0, HAND_OUT)
  if #past > 0 then
    redis.call('ZREM', debts, unpack(past))
  end
end

local function begin_waiting(base, class, tenant)
  local turns, served, debts = base .. 'turns:' .. class, base .. 'served:' .. class, base .. 'debts:' .. class
  if redis.call('ZSCORE', turns, tenant) then
    return
  end
  local turn = redis.call('HGET', base .. 'load', 'turn:' .. class) or '0'
  local lowest = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2] or turn
  local own = redis.call('ZSCORE', served, tenant) or redis.call('ZSCORE', debts, tenant) or '0'
  local score = math.max(tonumber(own), tonumber(lowest))
  redis.call('ZREM', debts, tenant)
  forget_debts(debts, turn)
  redis.call('ZADD', served, whole(score), tenant)
  redis.call('ZADD', turns, whole(score), tenant)
end

-- The tenant's turn has come.
local function note_turn(base, class, score)
  local load, name = base .. 'load', 'turn:' .. class
  if tonumber(score) > tonumber(redis.call('HGET', load, name) or '0') then
    redis.call('HSET', load, name, whole(tonumber(score)))
  end
end

local function charge(base, class, tenant, tokens)
  for _, counts in ipairs({'served:', 'turns:', 'debts:'}) do
    if redis.call('ZSCORE', base .. counts .. class, tenant) then
      redis.call('ZINCRBY', base .. counts .. class, whole(tokens), tenant)
    end
  end
end
