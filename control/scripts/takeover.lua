-- Take what was delivered to another replica whose lock is absent, and move its epoch on so that its leader, should it
-- wake, is fenced.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)  4 the replica's last claim (string)  5 bell (stream)
--      6 the other's lock (string)  7 the other's epoch (string)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id  4 id of this call, any text  5 the other's id
-- Returns as claim does.
--@include clock
--@include fence
--@include poisoned
--@include queue
--@include ending
--@include claimed
local token, base, replica, other = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end
local again = repeated(base, token, KEYS[4], ARGV[4])
if again then
  return {'OK', last_bell(KEYS[5]), again}
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {'OK', last_bell(KEYS[5]), {}}
end
local now, claimed = server_ms(), {}
local epoch = math.max(tonumber(redis.call('GET', KEYS[7]) or '0') + 1, now)
redis.call('SET', KEYS[7], whole(epoch))

local function take_pending(class, tenant)
  local queue = base .. 'queue:' .. class .. ':' .. tenant
  if redis.call('EXISTS', queue) == 0 then
    return
  end
  ensure_group(queue)
  for _, pending in ipairs(redis.call('XPENDING', queue, GROUP, '-', '+', 100000, other)) do
    local id = pending[1]
    local entry = redis.call('XRANGE', queue, id, id)[1]
    if not entry then
      redis.call('XACK', queue, GROUP, id) -- deleted while it was pending
    else
      redis.call('XCLAIM', queue, GROUP, replica, 0, id, 'JUSTID')
      if adopt(base, class, tenant, id, entry[2][2], token, now) then
        claimed[#claimed + 1] = describe(base, entry[2][2])
      end
    end
  end
end
for _, class in ipairs(CLASSES) do
  for _, tenant in ipairs(redis.call('ZRANGE', base .. 'served:' .. class, 0, -1)) do
    take_pending(class, tenant)
  end
end
remember(KEYS[4], ARGV[4], claimed)
return {'OK', last_bell(KEYS[5]), claimed}
