-- Buckets that fill evenly within a minute; needs clock. An absent level is a full bucket, one below nothing is a debt
-- that a request left which took more than was estimated.
local MINUTE_MS = 60000

local function filled(level, limit, elapsed)
  return math.min(limit, tonumber(level or limit) + limit * elapsed / MINUTE_MS)
end

-- The levels of both buckets at `now`.
local function read_levels(bucket, rpm, tpm, now)
  local was = redis.call('HMGET', bucket, 'requests', 'tokens', 'at')
  local elapsed = math.max(0, now - tonumber(was[3] or whole(now)))
  return filled(was[1], rpm, elapsed), filled(was[2], tpm, elapsed)
end

-- Milliseconds until a bucket is full, or has `need` of it.
local function until_it_has(need, level, limit)
  if limit == 0 or level >= need then
    return 0
  end
  return math.ceil((need - level) * MINUTE_MS / limit)
end

-- A bucket that is full again by itself needs no memory of it.
local function write_levels(bucket, requests, tokens, rpm, tpm, now)
  redis.call('HSET', bucket, 'requests', string.format('%.4f', requests), 'tokens', string.format('%.4f', tokens),
    'at', whole(now))
  local life = math.max(until_it_has(rpm, requests, rpm), until_it_has(tpm, tokens, tpm))
  redis.call('PEXPIRE', bucket, whole(life + 1000))
end

-- Whole remaining requests and tokens, each with the ms until it is full.
local function told(requests, tokens, rpm, tpm)
  return whole(math.max(0, math.floor(requests))), whole(until_it_has(rpm, requests, rpm)),
    whole(math.max(0, math.floor(tokens))), whole(until_it_has(tpm, tokens, tpm))
end
