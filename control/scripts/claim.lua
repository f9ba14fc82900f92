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
    count_out(base, tokens) -- its hash has outlived its deadline and retention
    remove(base, class, tenant, id)
  elseif now >= tonumber(f[2]) then
    end_request(base, rid, 'expired', 'expired', 'deadline passed', now)
  else
    redis.call('HSET', req, 'state', 'running', 'owner', token, 'replica', replica, 't_claimed', whole(now))
    note_weights(base, rid, weights)
    redis.call('HINCRBY', req, 'attempts', 1)
    count_out(base, tokens)
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

-- The tenant whose turn it is, or nil.
local function next_tenant(class)
  for _, tenant in ipairs(redis.call('ZRANGE', base .. 'turns:' .. class, 0, looks)) do
    if not passed[base .. 'queue:' .. class .. ':' .. tenant] then
      return tenant
    end
  end
end

local function claim_waiting()
  for _, class in ipairs(CLASSES) do
    while room > 0 and ahead > 0 do
      local tenant = next_tenant(class)
      if not tenant then
        break
      end
      local head = peek(base .. 'queue:' .. class .. ':' .. tenant)
      if not head then
        redis.call('ZREM', base .. 'turns:' .. class, tenant)
      elseif not take_head(class, tenant, head) then
        return
      end
    end
  end
end
claim_waiting()

remember(KEYS[4], ARGV[4], claimed)
return {'OK', last_bell(KEYS[5]), claimed}
