-- A leader takes waiting requests that it has room for. Beyond that it takes guests: requests of flows (class and tenant)
-- that have less than their share of the leader's places, and for which it takes places from those that have more.
-- Of a paused model it takes nothing.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)  4 the replica's last claim (string)  5 bell (stream)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id (the consumer)  4 id of this call, any text
--      5 room for sequences (int)  6 room for prompt tokens (int)
--      7 prompt tokens after which no further request is taken (int)
--      8 fingerprint of the leader's weights, or '': what began with others is not taken
--      9 tenants of each class to skip, whose requests all began with other weights (int)
--      10 guests beyond the room (int)  11 flows that are no guests (JSON): ["class tenant", …]
-- Returns {'OK', last id of the bell, {{rid, tenant, class, attempts, deadline, seq, open choices, ms, ms, ms}, …},
--      1 where another call may find more at once, else 0, tenants to skip at the next call},
--      {'LOST', why}, {'FENCED', why} or {'POISONED', kind, message, rank}.
-- Looks at HAND_OUT heads of queues at most, whether they are taken, have expired or are passed on, and ends about
-- HAND_OUT_CHOICES choices.
--@keys any any any any stream
--@arguments token base word word count count count text count count list
--@include clock
--@include fence
--@include poisoned
--@include turns
--@include running
--@include queue
--@include bell
--@include drain
--@include ended
--@include ending
--@include requeue
--@include weights
--@include claimed
local token, base, replica = ARGV[1], ARGV[2], ARGV[3]
local room, room_tokens, ahead = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local weights, skip, guests = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
local sated, most_sated = {}, 0 -- flows that are no guests
local crowded = false -- whether only guests are taken
for _, flow in ipairs(cjson.decode(ARGV[11])) do
  sated[flow], most_sated = true, most_sated + 1
end
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end
local again = repeated(base, token, KEYS[4], ARGV[4])
if again then
  return {'OK', last_bell(KEYS[5]), again, 1, skip}
end
if redis.call('HGET', base .. 'spec', 'paused') == 'true' then
  return {'OK', last_bell(KEYS[5]), {}, 0, skip}
end

local now, claimed = server_ms(), {}
-- How many heads and turns this call may still look at, and how many requests have left their queues.
local looks, gone = HAND_OUT, 0
-- A queue whose heads began with other weights is looked at PASSES times, and then passed: the next tenant of the class
-- comes. After PASSED_QUEUES such queues the call ends, and the next one begins behind them.
local PASSES, PASSED_QUEUES = 16, 8
local passes, passed, passed_queues = {}, {}, 0

-- True if there is room for the first choice of a request; the others may follow it one by one.
local function fits(tokens)
  return crowded or tokens <= room_tokens
end

-- Take the head of a tenant's queue. Returns false when it does not fit: then nothing behind it goes first. A head that
-- began with other weights goes to the end of its queue, once.
local function take_head(class, tenant, entry)
  local queue, id, rid = base .. 'queue:' .. class .. ':' .. tenant, entry[1], entry[2][2]
  local tokens, n, req = tonumber(entry[2][4]), tonumber(entry[2][6] or '1'), base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'state', 'deadline', 'epochs')
  if f[1] == 'queued' and now < tonumber(f[2]) and not fits(tokens) then
    return false
  end
  local others = f[1] == 'queued' and now < tonumber(f[2]) and other_weights(base, rid, weights)
  if others then
    passes[queue] = (passes[queue] or 0) + 1
    if passes[queue] > PASSES or passed[rid] then
      passed[queue], passed_queues = true, passed_queues + 1
    else
      passed[rid] = true
      pass_on(base, rid, others, now)
    end
    return true
  end
  take(queue, replica)
  gone = gone + 1
  if f[1] ~= 'queued' then
    count_out(base, rid, class, tenant, tokens, n) -- its hash has outlived its deadline and retention
    remove(base, class, tenant, id)
  elseif now >= tonumber(f[2]) then
    end_request(base, rid, 'expired', 'expired', 'deadline passed', now)
  else
    redis.call('HSET', req, 'state', 'running', 'owner', token, 'replica', replica, 't_claimed', whole(now),
      'epochs', with_epoch(f[3], replica, token, now))
    note_weights(base, rid, weights)
    redis.call('HINCRBY', req, 'attempts', 1)
    count_out(base, rid, class, tenant, tokens, n)
    local handed = describe(base, rid)
    local open = tonumber(handed[7])
    local fed = tokens + (open - 1) * math.min(tokens, CHOICE_TOKENS)
    charge(base, class, tenant, fed)
    redis.call('ZADD', running_on(base, replica), 0, place_of(rid, class, id, tenant))
    claimed[#claimed + 1] = handed
    room, room_tokens, ahead = room - open, room_tokens - open * tokens, ahead - fed
    if crowded then
      guests, sated[class .. ' ' .. tenant], most_sated = guests - 1, true, most_sated + 1
    end
  end
  return true
end

-- The tenant of a class that was served least, what it was served, and the head of its queue; nil where nobody waits.
local function next_tenant(class)
  local turns, removed = base .. 'turns:' .. class, true
  while removed and looks > 0 do
    local last = skip + passed_queues + (crowded and most_sated or 0)
    local order = redis.call('ZRANGE', turns, skip, last, 'WITHSCORES')
    removed = false
    for i = 1, #order, 2 do
      local queue = base .. 'queue:' .. class .. ':' .. order[i]
      local full = passed[queue] or (crowded and sated[class .. ' ' .. order[i]])
      local head = not full and peek(queue)
      if head then
        return {class = class, tenant = order[i], served = order[i + 1], head = head}
      elseif not full then
        redis.call('ZREM', turns, order[i])
        removed, looks = true, looks - 1
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

while looks > 0 and may_end() and passed_queues < PASSED_QUEUES do
  crowded = crowded or room <= 0 or ahead <= 0
  if crowded and guests <= 0 then
    break
  end
  looks = looks - 1
  local here, before = next_in_order(), #claimed
  if not here then
    break
  end
  if not take_head(here.class, here.tenant, here.head) then
    crowded = true -- nothing that needs room goes before it
  end
  if #claimed > before then
    if not crowded then
      note_turn(base, here.class, here.served)
    end
    count_passed(here.class)
  end
  if waiting_in(base .. 'queue:' .. here.class .. ':' .. here.tenant) == 0 then
    redis.call('ZREM', base .. 'turns:' .. here.class, here.tenant)
  end
end
-- A class without a turn has nothing that waits: counts that say otherwise, whatever left them, end here. So a place
-- that was lost costs nobody more than the time until the queue is empty or a leader starts.
local load = base .. 'load'
local queued = redis.call('HGET', load, 'queued')
if queued and queued ~= '0' then
  local empty = true
  for _, class in ipairs(CLASSES) do
    if redis.call('ZCARD', base .. 'turns:' .. class) > 0 then
      empty = false
    else
      redis.call('HDEL', load, 'queued:' .. class, 'sequences:' .. class)
      redis.call('UNLINK', base .. 'waiting:' .. class)
    end
  end
  if empty then
    redis.call('HSET', load, 'queued', 0, 'queued_tokens', 0)
  end
end
account_for_claim(base, now)

remember(KEYS[4], ARGV[4], claimed)
local stopped = looks <= 0 or not may_end() or passed_queues == PASSED_QUEUES
local more = (looks <= 0 and gone > 0) or not may_end()
return {'OK', last_bell(KEYS[5]), claimed, more and 1 or 0, whole(stopped and skip + passed_queues or 0)}
