-- Apply `on_disconnect` to a request without a follower; needs clock, bell, queue and ending.

-- Ask for the end of a request: a queued one ends at once, a running one at its leader's next step.
local function cancel_request(base, rid, cause, now)
  local req = base .. 'req:' .. rid
  local state = redis.call('HGET', req, 'state')
  if state == 'queued' then
    end_request(base, rid, 'cancelled', 'cancelled', cause, now)
    return 'cancelled'
  end
  if state == 'running' and redis.call('HGET', req, 'cancel') ~= '1' then
    redis.call('HSET', req, 'cancel', 1, 't_cancel', whole(now))
    ring(base, 'cancel', rid)
  end
  return state
end

-- The last follower has left: cancel after `grace` ms, or as the request's own on_disconnect says.
local function apply_disconnect(base, rid, grace, now)
  local req = base .. 'req:' .. rid
  local policy = redis.call('HGET', req, 'on_disconnect')
  if policy == 'continue' then
    return
  end
  local wait = math.max(grace, (tonumber(policy) or 0) * 1000)
  if wait == 0 then
    cancel_request(base, rid, 'client disconnected', now)
    return
  end
  redis.call('HSET', req, 'orphan_at', whole(now + wait))
  redis.call('ZADD', base .. 'orphans', whole(now + wait), rid)
end
