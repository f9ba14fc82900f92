-- Before a takeover: what the other replica's docket suspects stays with it, marked, because it may crash whoever takes it.
-- Only where that replica was given up, or has no host, the caller inherits its docket: one replica of the model at a time.
-- KEYS 1 lock (string)  2 epoch (string)  3 the model's docket (hash)  4 trial (string)  5 weights (hash)
--      6 the other's lock (string)  7 the other's status (hash)  8 the other's poisons (stream)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id  4 the other's id
-- Returns {'OK', how}: 'free' nothing that is suspected stays behind, 'stays' it waits for its own replica, 'waits' until
--      another replica has ended its trial, 'inherited' the caller has the docket; {'LOST', why} or {'FENCED', why}.
--@keys string string hash string hash string hash stream
--@arguments token base word word
--@include fence
--@include docket
local base, replica, other = ARGV[2], ARGV[3], ARGV[4]
if replica == other then
  refuse('argument 4', other, 'another replica')
end
local refused = fence(ARGV[1])
if refused then
  return refused
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {'OK', 'stays'} -- it leads again: nothing will be taken from it
end
local heirloom = replica .. '/' .. other
local state = redis.call('HGET', KEYS[7], 'state')
local given_up = state == 'failed' or state == 'unplaceable'
local text = redis.call('HGET', KEYS[3], other)
local suspects = text and suspected(base, other, text, KEYS[8]) or {}
if state == 'failed' then
  redis.call('HDEL', KEYS[5], other) -- no request waits for its weights any more
end
if redis.call('HEXISTS', KEYS[3], heirloom) == 1 then
  return {'OK', 'inherited'} -- the same call again
end
if #suspects == 0 then
  redis.call('HDEL', KEYS[3], other) -- all that it named has got on, ended, or is another's by now
  return {'OK', 'free'}
end
local holder = redis.call('GET', KEYS[4])
local taken = given_up and (not holder or holder == replica)
if taken then
  redis.call('SET', KEYS[4], replica, 'PX', TRIAL_MS)
  redis.call('HSET', KEYS[3], heirloom, text)
  redis.call('HDEL', KEYS[3], other)
  redis.call('PEXPIRE', KEYS[3], SUSPECTS_MS)
end
for _, rid in ipairs(suspects) do
  local req = base .. 'req:' .. rid
  if taken then
    redis.call('HDEL', req, 'suspect') -- its heir marks it again before the next step
  elseif redis.call('EXISTS', req) == 1 then
    redis.call('HSET', req, 'suspect', 1)
  end
end
return {'OK', taken and 'inherited' or given_up and 'waits' or 'stays'}
