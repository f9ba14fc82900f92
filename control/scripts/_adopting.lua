-- A leader takes up what was delivered before, in batches; needs running, queue, ending, weights and claimed.

-- Take over one request of the replica `from` for the replica `to`, whose leader has `token`. False if it is over.
local function adopt(base, held, from, to, token, weights, now)
  local rid, class, id, tenant, place = unpack(held)
  local req = base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'state', 'owner', 'cancel', 'deadline', 'entry', 'epochs')
  if f[1] ~= 'running' or f[5] ~= id then
    redis.call('ZREM', running_on(base, from), place)
    if f[5] ~= id then -- its hash has outlived its deadline and retention
      remove(base, class, tenant, id)
    end
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
  if from ~= to and redis.call('HGET', req, 'suspect') == '1' then
    return false -- it may crash whoever takes it: see inherit
  end
  if others and from ~= to and redis.call('HEXISTS', base .. 'weights', from) == 1 then
    return false -- its own replica may come back to it; one that was given up has no weights any more
  end
  if others then
    pass_on(base, rid, others, now)
    return false
  end
  note_weights(base, rid, weights)
  if from ~= to then
    redis.call('XCLAIM', base .. 'queue:' .. class .. ':' .. tenant, GROUP, to, 0, id, 'JUSTID')
    redis.call('ZREM', running_on(base, from), place)
    redis.call('ZADD', running_on(base, to), 0, place)
  end
  -- Adopting twice in one epoch (a lost reply) is one attempt.
  if f[2] ~= token then
    redis.call('HSET', req, 'owner', token, 'replica', to, 'epochs', with_epoch(f[6], to, token, now))
    redis.call('HINCRBY', req, 'attempts', 1)
  end
  return true
end

-- Adopt the next batch, room or not: somebody waits for it. What was cancelled, or is past its deadline, ends here, about
-- HAND_OUT_CHOICES choices in one call.
-- Returns what was adopted, the place after which to go on, and 1 where there may be more, else 0.
local function adopt_batch(base, from, to, token, weights, after, now)
  local batch, rest, more = next_running(base, from, after)
  local adopted = {}
  for i, held in ipairs(batch) do
    if not may_end() then
      return adopted, batch[i - 1][5], 1
    end
    if adopt(base, held, from, to, token, weights, now) then
      adopted[#adopted + 1] = describe(base, held[1])
    end
  end
  return adopted, rest, more
end
