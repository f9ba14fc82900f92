-- Every entry that was delivered to `consumer` and is still in its queue, as {class, tenant, entry id, rid}; needs queue.
local MOST_PENDING = 100000

local function delivered_to(base, consumer)
  local found = {}
  for _, class in ipairs(CLASSES) do
    for _, tenant in ipairs(redis.call('ZRANGE', base .. 'served:' .. class, 0, -1)) do
      local queue, pending = base .. 'queue:' .. class .. ':' .. tenant, {}
      if redis.call('EXISTS', queue) == 1 then
        last_delivered(queue) -- makes sure of the group
        pending = redis.call('XPENDING', queue, GROUP, '-', '+', MOST_PENDING, consumer)
      end
      for _, delivered in ipairs(pending) do
        local id = delivered[1]
        local entry = redis.call('XRANGE', queue, id, id)[1]
        if entry then
          found[#found + 1] = {class, tenant, id, entry[2][2]}
        else
          redis.pcall('XACK', queue, GROUP, id) -- deleted while it was pending
        end
      end
    end
  end
  return found
end
