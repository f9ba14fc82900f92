-- Tokens of one answer come from one set of weights; needs ending and requeue.

local WEIGHTS_GONE = "the model's weights were replaced while this request ran, and no replica has those that it began with"

-- The fingerprint of the weights that a request's tokens came from, if they are others than `mine`; else nil. A leader
-- that tells none continues everything, and so is a request continued whose log came back after a loss of data.
local function other_weights(base, rid, mine)
  local f = redis.call('HMGET', base .. 'req:' .. rid, 'weights', 'seq')
  if mine ~= '' and f[1] and f[1] ~= '' and f[1] ~= mine and f[2] ~= '0' then
    return f[1]
  end
  return nil
end

-- The fingerprints that the model's replicas have, read once in a script however many requests are passed on.
local fingerprints = nil

local function has_weights(base, wanted)
  if not fingerprints then
    fingerprints = {}
    for _, weights in ipairs(redis.call('HVALS', base .. 'weights')) do
      fingerprints[weights] = true
    end
  end
  return fingerprints[wanted] ~= nil
end

-- A request that began with other weights waits for a replica that has them; where none is known any more it ends.
local function pass_on(base, rid, weights, now)
  if has_weights(base, weights) then
    put_back(base, rid)
  else
    end_request(base, rid, 'finished', 'error', WEIGHTS_GONE, now)
  end
end

local function note_weights(base, rid, mine)
  if mine ~= '' then
    redis.call('HSET', base .. 'req:' .. rid, 'weights', mine)
  end
end
