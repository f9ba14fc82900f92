-- A replica that no host has any more is forgotten, and what it left goes back to the queue. Where it left anything its
-- epoch moves on, so that its leader, should it wake, is fenced.
-- KEYS 1 its lock (string)  2 its epoch (string)  3 replicas (hash)  4 weights (hash)  5 backends (hash)
-- ARGV 1 the model's base key  2 the replica's base key  3 replica id
--      4 another replica of the model that was seen with a leader, '' for none
-- Returns {the number of requests that wait again, 1 while there are more}, or {-1, 0} while it holds its lock, or while
--      another replica may inherit what it suspects: back in the queue that could crash every replica.
-- At most HAND_OUT requests a call; the replica is forgotten with the last.
--@keys string string hash hash hash
--@arguments base prefix word text
--@model load bell classes
--@include clock
--@include bell
--@include turns
--@include running
--@include queue
--@include requeue
local base, replica = ARGV[1], ARGV[3]
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {-1, 0}
end

local state = redis.call('HGET', ARGV[2] .. 'status', 'state')
local given_up = state == 'failed' or state == 'unplaceable'
local heir = ARGV[4] ~= '' and ARGV[4] ~= replica and redis.call('EXISTS', base .. ARGV[4] .. ':lock') == 1
if given_up and heir and redis.call('HEXISTS', base .. 'docket', replica) == 1 then
  return {-1, 0}
end
local epoch, returned = number_in(KEYS[2]), 0
local batch, _, more = next_running(base, replica, '')
for _, held in ipairs(batch) do
  local rid, class, id, tenant, place = unpack(held)
  local f = redis.call('HMGET', base .. 'req:' .. rid, 'state', 'entry')
  if f[1] == 'running' and f[2] == id then
    put_back(base, rid)
    returned = returned + 1
  else
    remove(base, class, tenant, id)
  end
  redis.call('ZREM', running_on(base, replica), place)
end
if returned > 0 then
  redis.call('SET', KEYS[2], whole(math.max(epoch + 1, server_ms())))
end
if more == 1 then
  return {returned, 1}
end
redis.call('HDEL', KEYS[3], replica)
redis.call('HDEL', KEYS[4], replica)
redis.call('HDEL', KEYS[5], replica)
redis.call('UNLINK', ARGV[2] .. 'status', ARGV[2] .. 'claim')
redis.call('HDEL', base .. 'docket', replica)
return {returned, 0}
