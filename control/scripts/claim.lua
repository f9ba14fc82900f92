-- A leader takes as many waiting requests as it has room for; on a new epoch it first adopts what its replica has.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)  4 the replica's last claim (string)  5 bell (stream)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id (the consumer)  4 id of this call, any text
--      5 room for requests (int)  6 room for prompt tokens (int)  7 adopt 0|1
--      8 prompt tokens after which no further request is taken (int)
--      9 fingerprint of the leader's weights, or '': what began with others is not taken
-- Returns {'OK', last id of the bell, {{rid, params, tenant, class, attempts, deadline, {log entries}}, …}},
--      {'LOST', why}, {'FENCED', why} or {'POISONED', kind, message, rank}.
--@include clock
--@include fence
--@include poisoned
--@include turns
--@include queue
--@include bell
--@include drain
--@include ending
--@include requeue
--@include weights
--@include delivered
--@include claimed
local token, base, replica = ARGV[1], ARGV[2], ARGV[3]
local room, room_tokens, ahead = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])
local weights = ARGV[9]
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end
local again = repeated(base, token, KEYS[4], ARGV[4])
if again then
  return {'OK', last_bell(KEYS[5]), again}
end

local now, claimed = server_ms(), {}
local passed, looks = {}, 0 -- requests passed on, queues where all that waits was; how far to look for a tenant

-- Take the head of a tenant's queue. Returns false when it does not fit: then nothing behind it goes first. A head that
-- began with other weights goes to the end of its queue, once.
local function take_head(class, tenant, entry)
  local queue, id, rid = base .. 'queue:' .. class .. ':' .. tenant, entry[1], entry[2][2]
  local tokens, req = tonumber(entry[2][4]), base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'state', 'deadline')
  if f[1] == 'queued' and now < tonumber(f[2]) and tokens > room_tokens then
    return false
  end
  local others = f[1] == 'queued' and now < tonumber(f[2]) and other_weights(base, rid, weights)
  if others then
    if passed[rid] then
      passed[queue], looks = true, -1
    else
      passed[rid] = true
      pass_on(base, rid, others, now)
    end
    return true
  end
  take(queue, replica)
  if f[1] ~= 'queued' then
    count_out(base, class, tokens) -- its hash has outlived its deadline and retention
    remove(base, class, tenant, id)
  elseif now >= tonumber(f[2]) then
    end_request(base, rid, 'expired', 'expired', 'deadline passed', now)
  else
    redis.call('HSET', req, 'state', 'running', 'owner', token, 'replica', replica, 't_claimed', whole(now))
    note_weights(base, rid, weights)
    redis.call('HINCRBY', req, 'attempts', 1)
    count_out(base, class, tokens)
    charge(base, class, tenant, tokens)
    claimed[#claimed + 1] = describe(base, rid)
    room, room_tokens, ahead = room - 1, room_tokens - tokens, ahead - tokens
  end
  return true
end

if ARGV[7] == '1' then
  adopt_all(base, replica, replica, token, weights, now, claimed)
  room = room - #claimed
end

-- The tenant of a class that was served least, what it was served, and the head of its queue; nil where nobody waits.
local function next_tenant(class)
  local turns, removed = base .. 'turns:' .. class, true
  while removed do
    local order = redis.call('ZRANGE', turns, 0, looks, 'WITHSCORES')
    removed = false
    for i = 1, #order, 2 do
      local queue = base .. 'queue:' .. class .. ':' .. order[i]
      local head = not passed[queue] and peek(queue)
      if head then
        return {class = class, tenant = order[i], served = order[i + 1], head = head}
      elseif not passed[queue] then
        redis.call('ZREM', turns, order[i])
        removed = true
      end
    end
  end
  return nil
end

-- Classes come in order, but who was passed over PASSED_OVER times in a row is next: nobody waits for ever.
local function next_in_order()
  local first, load = nil, base .. 'load'
  for _, class in ipairs(CLASSES) do
    local here = next_tenant(class)
    if here and not first then
      first = here
    elseif here and tonumber(redis.call('HGET', load, 'passed:' .. class) or '0') >= PASSED_OVER then
      return here
    end
  end
  return first
end

local function count_passed(class)
  local behind = false
  for _, other in ipairs(CLASSES) do
    if other == class then
      behind = true
      redis.call('HDEL', base .. 'load', 'passed:' .. class)
    elseif behind and redis.call('ZCARD', base .. 'turns:' .. other) > 0 then
      redis.call('HINCRBY', base .. 'load', 'passed:' .. other, 1)
    end
  end
end

while room > 0 and ahead > 0 do
  local here, before = next_in_order(), #claimed
  if not here or not take_head(here.class, here.tenant, here.head) then
    break
  end
  if #claimed > before then
    note_turn(base, here.class, here.served)
    count_passed(here.class)
  end
  if waiting_in(base .. 'queue:' .. here.class .. ':' .. here.tenant) == 0 then
    redis.call('ZREM', base .. 'turns:' .. here.class, here.tenant)
  end
end
account_for_claim(base, now)

remember(KEYS[4], ARGV[4], claimed)
return {'OK', last_bell(KEYS[5]), claimed}
