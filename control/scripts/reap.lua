-- Apply on_disconnect for those who can't: api processes that are gone, and requests whose wait for a follower is over.
-- KEYS 1 orphans (zset rid → ms)
-- ARGV 1 the model's base key  2 grace, ms (int): how long a request of a gone api waits for another  3… gone api ids
-- Returns {the rids whose end was asked for, 1 where another call may find more, else 0}. At most HAND_OUT requests of gone
-- api processes a call, and as many whose wait is over, together about HAND_OUT_CHOICES choices of requests that wait.
--@keys zset
--@arguments base count word…
--@model load bell orphans settlements classes
--@include clock
--@include bell
--@include followers
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include orphans
local base, now = ARGV[1], server_ms()

local function forget_gone(rid)
  local req = base .. 'req:' .. rid
  local was = redis.call('HMGET', req, 'state', 'followers')
  if not was[1] or not was[2] or was[2] == '' then
    return
  end
  local left = was[2]
  for i = 3, #ARGV do
    left = without_follower(left, ARGV[i])
  end
  if left ~= was[2] then
    redis.call('HSET', req, 'followers', left)
    if left == '' then
      apply_disconnect(base, rid, tonumber(ARGV[2]), now)
    end
  end
end

local looks = HAND_OUT
for i = 3, #ARGV do
  local followed = looks > 0 and redis.call('ZRANGE', base .. 'followed:' .. ARGV[i], 0, looks - 1) or {}
  for _, rid in ipairs(followed) do
    if not may_end() then
      break
    end
    forget_gone(rid)
    forget_follower(base, ARGV[i], rid)
    looks = looks - 1
  end
end

local due, ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now), 'LIMIT', 0, HAND_OUT), {}
for i, rid in ipairs(due) do
  if not may_end() then
    break
  end
  redis.call('ZREM', KEYS[1], rid)
  cancel_request(base, rid, 'client disconnected', now)
  ended[i] = rid
end
return {ended, (looks <= 0 or #due == HAND_OUT or not may_end()) and 1 or 0}
