-- Fair order between tenants. `served:<class>` counts the virtual tokens of every tenant that has something queued or
-- running; `turns:<class>` holds the same count for those that have something waiting, lowest first.

-- A tenant that begins to wait is lifted to the lowest waiting one, so that an idle past earns no monopoly.
local function begin_waiting(base, class, tenant)
  local turns, served = base .. 'turns:' .. class, base .. 'served:' .. class
  if redis.call('ZSCORE', turns, tenant) then
    return
  end
  local lowest = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
  if #lowest == 0 then
    lowest = redis.call('ZRANGE', served, 0, 0, 'WITHSCORES')
  end
  local score = tonumber(redis.call('ZSCORE', served, tenant) or '0')
  if #lowest > 0 and tonumber(lowest[2]) > score then
    score = tonumber(lowest[2])
  end
  redis.call('ZADD', served, whole(score), tenant)
  redis.call('ZADD', turns, whole(score), tenant)
end

local function charge(base, class, tenant, tokens)
  redis.call('ZINCRBY', base .. 'served:' .. class, whole(tokens), tenant)
  if redis.call('ZSCORE', base .. 'turns:' .. class, tenant) then
    redis.call('ZINCRBY', base .. 'turns:' .. class, whole(tokens), tenant)
  end
end
