-- How fast a model works its queue off, in sequences: a request of n choices is n of them. Needs clock. Only the time in
-- which something waits although a leader has just claimed all it had room for says anything about that: `busy_ms`, with
-- the sequences that ended in it, `busy_ends`.
-- `busy_since` is the moment up to which it is counted, absent while nothing waits. Both fade with each end, so that
-- those of the last DRAIN_WINDOW_MS count, but at least those of DRAIN_ENDS requests, which may have taken minutes: of so
-- few that end in bursts the estimate is off by a quarter now and then. They fade with the time in which nothing waits, too.
local DRAIN_ENDS = 16
local DRAIN_ENDS_MOST = 256
local DRAIN_WINDOW_MS = 5000
local DRAIN_IDLE_MS = 30000
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
  local busy, ends = tonumber(was[3] or '0'), tonumber(was[4] or '0')
  if since then
    busy = busy + math.min(now - since, DRAIN_GAP_MS)
  else
    local fade = math.exp(-math.max(0, now - tonumber(was[5] or whole(now))) / DRAIN_IDLE_MS)
    busy, ends = busy * fade, ends * fade
  end
  redis.call('HSET', load, 'busy_ms', string.format('%.3f', busy), 'busy_ends', string.format('%.3f', ends),
    'busy_at', whole(now))
  if waits then
    redis.call('HSET', load, 'busy_since', whole(now))
  else
    redis.call('HDEL', load, 'busy_since')
  end
end

-- A request of `n` sequences that ran has ended while others wait. It fades the earlier ends as one end: those of a
-- request with many choices end together, and must not make up the window alone.
local function account_for_end(base, n)
  local load = base .. 'load'
  local was = redis.call('HMGET', load, 'busy_since', 'busy_ms', 'busy_ends')
  if was[1] then
    local busy, ends = tonumber(was[2] or '0'), tonumber(was[3] or '0')
    local recent = busy > 0 and ends / n / busy * DRAIN_WINDOW_MS or 0 -- requests like this one
    local fade = 1 - 1 / math.max(DRAIN_ENDS, math.min(DRAIN_ENDS_MOST, recent))
    redis.call('HSET', load, 'busy_ms', string.format('%.3f', busy * fade),
      'busy_ends', string.format('%.3f', ends * fade + n))
  end
end

-- The delay of a first token beyond the sequences ahead of it, in ms: its own prompt, and the lag of the estimate. The
-- mean of about SLIP_FIRSTS requests that came while others waited.
local SLIP_FIRSTS = 32

local function account_for_first(base, req, now)
  local was = redis.call('HMGET', req, 'expected', 't_enqueued')
  if was[1] then
    local load = base .. 'load'
    local slip = tonumber(redis.call('HGET', load, 'slip') or '0')
    local late = math.min(now - tonumber(was[2]) - tonumber(was[1]), DRAIN_GAP_MS)
    redis.call('HSET', load, 'slip', string.format('%.3f', slip + (late - slip) / SLIP_FIRSTS))
  end
end

-- Milliseconds in which `ahead` sequences will have gone, or nil where that can't be told: nothing waited at the last
-- claim, or too little has been seen since: neither a few ends nor TOO_LONG times the `patience` (ms) without them.
-- The next end is taken to be due now, so no estimate is for ever.
local ENDS_ENOUGH = 4
local TOO_LONG = 10

local function expected_wait(base, ahead, patience)
  local was = redis.call('HMGET', base .. 'load', 'busy_since', 'busy_ms', 'busy_ends')
  local busy, ends = tonumber(was[2] or '0'), tonumber(was[3] or '0')
  if not was[1] or busy == 0 or (ends < ENDS_ENOUGH and busy < TOO_LONG * patience) then
    return nil
  end
  return ahead * busy / (ends + 1)
end
