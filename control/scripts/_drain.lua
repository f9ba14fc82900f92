-- How fast a model works its queue off; needs clock. Only the time in which something waits although a leader has just
-- claimed all it had room for says anything about that: `busy_ms`, with the requests that ended in it, `busy_ends`.
-- Both fade together, over about half a minute.
local DRAIN_WINDOW_MS = 30000
-- The books are kept this often, not with every step; a longer silence (a recovery, a load) is not counted as work.
local DRAIN_TICK_MS = 100
local DRAIN_GAP_MS = 5000

-- After a claim: count the time since the last one if something has waited all along.
local function account_for_claim(base, now)
  local load = base .. 'load'
  local was = redis.call('HMGET', load, 'queued', 'busy_since', 'busy_ms', 'busy_ends', 'busy_at')
  local waits, since = tonumber(was[1] or '0') > 0, tonumber(was[2] or '')
  if (not waits and not since) or (waits and since and now - since < DRAIN_TICK_MS) then
    return
  end
  local fade = math.exp(-math.max(0, now - tonumber(was[5] or whole(now))) / DRAIN_WINDOW_MS)
  local busy = tonumber(was[3] or '0') * fade + (since and math.min(now - since, DRAIN_GAP_MS) or 0)
  redis.call('HSET', load, 'busy_ms', string.format('%.3f', busy), 'busy_at', whole(now),
    'busy_ends', string.format('%.6f', tonumber(was[4] or '0') * fade))
  if waits then
    redis.call('HSET', load, 'busy_since', whole(now))
  else
    redis.call('HDEL', load, 'busy_since')
  end
end

-- Milliseconds in which `ahead` requests will have gone, or nil where too little has been seen to say: a farm that was
-- idle just now, or one that began to be busy. The next end is taken to be due now, so no estimate is for ever.
local ENDS_ENOUGH = 4

local function expected_wait(base, ahead, patience)
  local was = redis.call('HMGET', base .. 'load', 'busy_ms', 'busy_ends')
  local busy, ends = tonumber(was[1] or '0'), tonumber(was[2] or '0')
  if busy == 0 or (ends < ENDS_ENOUGH and busy < patience) then
    return nil
  end
  return ahead * busy / (ends + 1)
end
