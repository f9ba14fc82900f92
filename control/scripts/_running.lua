-- The requests that a replica runs: `<replica>:running` holds a place `rid class entry tenant` for each request, in order of rid. So
-- a replica's requests are found without a look at any queue, and in batches: a place is where the next batch begins.

local function running_on(base, replica)
  return base .. replica .. ':running'
end

local function place_of(rid, class, entry, tenant)
  return rid .. ' ' .. class .. ' ' .. entry .. ' ' .. tenant
end

-- {rid, class, entry, tenant, place} of each of the next HAND_OUT requests after the place `after`; then the last place,
-- and 1 where there may be more behind it, else 0.
local function next_running(base, replica, after)
  local from = after == '' and '-' or '(' .. after
  local places, found = redis.call('ZRANGEBYLEX', running_on(base, replica), from, '+', 'LIMIT', 0, HAND_OUT), {}
  for i, place in ipairs(places) do
    local rid, class, entry, tenant = string.match(place, '^(%S+) (%S+) (%S+) (.*)$')
    found[i] = {rid, class, entry, tenant, place}
  end
  return found, places[#places] or after, #places == HAND_OUT and 1 or 0
end

-- Before the first write of a script that is about one request: its keys are of the types that they should be.
local function check_request(base, rid)
  local f = redis.call('HMGET', base .. 'req:' .. rid, 'priority', 'tenant', 'replica', 'idempotency')
  check_type(base .. 'log:' .. rid, 'stream')
  if f[1] and f[2] then
    check_type(base .. 'queue:' .. f[1] .. ':' .. f[2], 'stream')
    check_type(running_on(base, f[3] or ''), 'zset')
  end
end
