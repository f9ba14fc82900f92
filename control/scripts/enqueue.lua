-- Put a request into its tenant's queue, or join the one that runs under the same idempotency key.
-- KEYS 1 load (hash)  2 staged log (stream): what was delivered before a loss of data
-- ARGV 1 the model's base key  2 rid  3 tenant  4 class  5 prompt tokens (int)  6 n (int)  7 seed (decimal string)
--      8 deadline, ms from now (int)  9 on_disconnect  10 api id or ''  11 idempotency key or ''  12 body hash
--      13 params (JSON)  14 view (opaque to all but the api)  15 t_received (ms)
--      16 most requests queued (int)  17 most tokens queued (int)
--      18 longest expected wait, ms (int), 0 for any  19 delivered entries without a token (int)
--      20 1 if Redis had it and lost it: it is not refused, and joins nothing but itself; else 0
--      21 what its usage is counted under, '' for nothing  22 id under which its key's limits were taken, '' for none
--      23 choices that have ended in the delivered entries  24 delivered entries in the staged log (int)
--      25 ms for which it is kept after its end (int), 0 for the retention
--      26 pieces of its images (int)
-- Returns {'OK', rid, joined 0|1, position}, {'BUSY', queued, seconds to wait, 'requests'|'tokens'|'wait'},
--      {'CONFLICT', rid} or {'LAPSED'}: the staged log, or a piece of an image, is not there any more.
--@keys hash stream
--@arguments base word text class positive positive digits positive text text text text name text count count count count count flag text text choices count count count
--@model bell orphans classes
--@include clock
--@include bell
--@include followers
--@include turns
--@include queue
--@include drain
--@include staged
local base, rid, tenant, class, tokens = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local api, key, deadline, load = ARGV[10], ARGV[11], tonumber(ARGV[8]), KEYS[1]
local lost = ARGV[20] == '1'

check_type(base .. 'log:' .. rid, 'stream')
check_type(base .. 'images:' .. rid, 'hash')
local delivered = tonumber(ARGV[24])

local function join(id, joined)
  local req = base .. 'req:' .. id
  local was = redis.call('HMGET', req, 'state', 'followers', 'ticket')
  if was[1] == 'queued' or was[1] == 'running' then
    redis.call('HSET', req, 'followers', with_follower(was[2], api))
    note_follower(base, api, id)
    redis.call('HDEL', req, 'orphan_at')
    redis.call('ZREM', base .. 'orphans', id)
  end
  local claimed = tonumber(redis.call('HGET', load, 'claimed') or '0')
  return {'OK', id, joined, math.max(1, tonumber(was[3] or '0') - claimed)}
end

if redis.call('EXISTS', base .. 'req:' .. rid) == 1 then
  return join(rid, 0)
end
local taken = false -- whether another request runs under the key
if key ~= '' then
  local known = redis.call('GET', base .. 'idem:' .. tenant .. ':' .. key)
  if known then
    local id, hash = string.match(known, '^(%S+) (.*)$')
    taken = redis.call('EXISTS', base .. 'req:' .. id) == 1
    if taken and not lost then
      if hash ~= ARGV[12] then
        return {'CONFLICT', id}
      end
      return join(id, 1)
    end
  end
end

local now = server_ms()
local queue = base .. 'queue:' .. class .. ':' .. tenant

-- How many sequences will go first: all of the classes above, and by turns as many of each other tenant as of this one.
local function sequences_ahead(sharers)
  local ahead, own = 0, tonumber(redis.call('ZSCORE', base .. 'waiting:' .. class, tenant) or '0')
  for _, other in ipairs(CLASSES) do
    local there = tonumber(redis.call('HGET', load, 'sequences:' .. other) or '0')
    if other == class then
      return ahead + math.min(there, own * sharers)
    end
    ahead = ahead + there
  end
end

-- Which bound a further request would break, or nil; and in how many ms those ahead of it will have gone, if that can be
-- told. Who has nobody ahead is not asked to wait for others, so what its own prompt takes is no reason. Where the
-- queue is full in requests, a tenant with less than its share of it still gets in: one alone can't shut the others
-- out, and the queue never holds more than twice the bound.
local function refusal(queued, queued_tokens)
  local own, turns = waiting_in(queue), base .. 'turns:' .. class
  local sharers = redis.call('ZCARD', turns) + (redis.call('ZSCORE', turns, tenant) and 0 or 1)
  local most, patience = tonumber(ARGV[16]), tonumber(ARGV[18])
  local wait = expected_wait(base, sequences_ahead(sharers), patience)
  if queued + 1 > 2 * most or (queued + 1 > most and own + 1 > most / sharers) then
    return 'requests', wait
  end
  if queued > 0 and queued_tokens + tokens > tonumber(ARGV[17]) then
    return 'tokens', wait
  end
  local slip = tonumber(redis.call('HGET', load, 'slip') or '0')
  if patience > 0 and wait and wait > 0 and wait + slip > patience then
    return 'wait', wait + slip
  end
  return nil, wait
end

local counts = redis.call('HMGET', load, 'queued', 'queued_tokens', 'rate')
local queued, rate = tonumber(counts[1] or '0'), tonumber(counts[3] or '0')
local bound, wait = refusal(queued, tonumber(counts[2] or '0'))
if bound and not lost then
  redis.call('UNLINK', base .. 'images:' .. rid) -- they would take memory for as long as they are staged
  local seconds = wait and wait / 1000 or (rate > 0 and queued / rate or 5)
  return {'BUSY', queued, string.format('%.3f', math.max(1, math.min(60, seconds))), bound}
end

if delivered > 0 and last_seq(KEYS[2]) ~= delivered then
  return {'LAPSED'}
end
local images, pieces = base .. 'images:' .. rid, tonumber(ARGV[26])
if pieces > 0 and redis.call('HLEN', images) ~= pieces then
  return {'LAPSED'}
end
if redis.call('EXISTS', queue) == 0 then
  redis.call('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
end
local entry = redis.call('XADD', queue, '*', 'rid', rid, 'tokens', ARGV[5], 'n', ARGV[6])
-- Position in the order of arrival: how many came before it less how many have left.
local ticket, position = count_in(base, rid, class, tenant, tokens, tonumber(ARGV[6]), now + deadline)
local req = base .. 'req:' .. rid
if wait then
  redis.call('HSET', req, 'expected', string.format('%.0f', wait))
end
redis.call('HSET', req, 'state', 'queued', 'owner', '', 'stream', queue, 'entry', entry, 'attempts', 0,
  'deadline', whole(now + deadline), 'cancel', 0, 'params', ARGV[13], 'prompt_tokens', ARGV[5], 'n', ARGV[6],
  'seed', ARGV[7], 'tenant', tenant, 'priority', class, 'on_disconnect', ARGV[9], 'view', ARGV[14],
  'seq', whole(delivered), 'tokenless', ARGV[19], 'followers', api, 'ticket', ticket,
  't_received', ARGV[15], 't_enqueued', whole(now), 'idempotency', taken and '' or key,
  'body_hash', key ~= '' and ARGV[12] or '', 'account', ARGV[21], 'hold', ARGV[22], 'ended', ARGV[23])
if tonumber(ARGV[25]) > 0 then
  redis.call('HSET', req, 'keep', ARGV[25])
end
note_follower(base, api, rid)
local life = whole(deadline + RETENTION_MS)
redis.call('PEXPIRE', req, life)
redis.call('PEXPIRE', images, life)
if delivered > 0 then -- the log is the truth from which a leader goes on
  redis.call('UNLINK', base .. 'log:' .. rid) -- RENAME would free an older one at once, however long
  redis.call('RENAME', KEYS[2], base .. 'log:' .. rid)
  redis.call('PEXPIRE', base .. 'log:' .. rid, life)
end
if key ~= '' and not taken then
  redis.call('SET', base .. 'idem:' .. tenant .. ':' .. key, rid .. ' ' .. ARGV[12], 'PX', life)
end
begin_waiting(base, class, tenant)
ring(base, 'enqueue', rid)
return {'OK', rid, 0, position}
