-- A leader gives a request back, to be claimed by any replica; its log stays, so it goes on where it was.
-- KEYS 1 lock (string)  2 epoch (string)  3 request (hash)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 rid
-- Returns {'OK', 1 if it is waiting now, else 0}, {'LOST', why} or {'FENCED', why}.
--@include clock
--@include fence
--@include bell
--@include turns
--@include queue
local token, base, rid = ARGV[1], ARGV[2], ARGV[3]
local refused = fence(token)
if refused then
  return refused
end
local f = redis.call('HMGET', KEYS[3], 'owner', 'state', 'priority', 'tenant', 'entry', 'prompt_tokens')
if f[2] == 'queued' and f[1] == '' then
  return {'OK', 1} -- the same call again
end
if f[1] ~= token or f[2] ~= 'running' then
  return {'OK', 0}
end
local class, tenant, tokens, load = f[3], f[4], f[6], base .. 'load'
local queue = base .. 'queue:' .. class .. ':' .. tenant
-- The new entry first: a stream that is never empty keeps its group and its tenant's turn.
local entry = redis.call('XADD', queue, '*', 'rid', rid, 'tokens', tokens)
remove(base, class, tenant, f[5])
redis.call('HINCRBY', load, 'queued_tokens', tokens)
redis.call('HINCRBY', load, 'enqueued', 1)
local position = redis.call('HINCRBY', load, 'queued', 1)
redis.call('HINCRBY', load, 'queued:' .. class, 1)
local claimed = tonumber(redis.call('HGET', load, 'claimed') or '0')
redis.call('HDEL', KEYS[3], 'suspect') -- suspicion belongs to the replica whose group it was in
redis.call('HSET', KEYS[3], 'state', 'queued', 'owner', '', 'entry', entry, 'ticket', whole(claimed + position))
begin_waiting(base, class, tenant)
ring(base, 'requeue', rid)
return {'OK', 1}
