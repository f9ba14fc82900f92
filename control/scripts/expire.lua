-- End the waiting requests whose deadline has passed while no leader came for them, the earliest first.
-- KEYS 1 deadlines (zset)
-- ARGV 1 the model's base key
-- Returns {requests that ended, 1 while there are more}. At most HAND_OUT requests a call, or the first after which
-- HAND_OUT_CHOICES choices have ended. A request that runs is its leader's to end.
--@keys zset
--@arguments base
--@model load orphans settlements classes
--@include clock
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
local now, ended = server_ms(), 0
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now), 'LIMIT', 0, HAND_OUT)
for _, rid in ipairs(due) do
  check_request(ARGV[1], rid)
end
for _, rid in ipairs(due) do
  if not may_end() then
    break
  end
  if redis.call('HGET', ARGV[1] .. 'req:' .. rid, 'state') == 'queued' then
    end_request(ARGV[1], rid, 'expired', 'expired', 'deadline passed', now)
    ended = ended + 1
  else
    redis.call('ZREM', KEYS[1], rid) -- a flush or its life took the request away
  end
end
return {ended, (#due == HAND_OUT or not may_end()) and 1 or 0}
