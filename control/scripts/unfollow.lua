-- An api process stops following; when it was the last one, the request's on_disconnect applies.
-- KEYS 1 request (hash)
-- ARGV 1 the model's base key  2 rid  3 api id  4 t_delivered (ms) or ''
--      5 least time to wait for another follower (ms)
-- Returns the request's state, or false if it is gone.
--@keys hash
--@arguments base request:1 text count? count
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
check_request(ARGV[1], ARGV[2])
local was = redis.call('HMGET', KEYS[1], 'state', 'followers')
forget_follower(ARGV[1], ARGV[3], ARGV[2])
if not was[1] then
  return false
end
local left = without_follower(was[2], ARGV[3])
redis.call('HSET', KEYS[1], 'followers', left)
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 't_delivered', ARGV[4])
end
local live = was[1] == 'queued' or was[1] == 'running'
-- Only a leaving follower is a disconnect; a repeat of the call is not.
if live and left == '' and was[2] ~= '' then
  apply_disconnect(ARGV[1], ARGV[2], tonumber(ARGV[5]), server_ms())
end
return redis.call('HGET', KEYS[1], 'state')
