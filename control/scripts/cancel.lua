-- A client cancels its request.
-- KEYS 1 request (hash)
-- ARGV 1 the model's base key  2 rid  3 tenant  4 cause
-- Returns {'OK', state} (cancelled, or running until the leader's next step) or {'ABSENT'}.
--@keys hash
--@arguments base request:1 text text
--@model load bell orphans settlements classes
--@include clock
--@include bell
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include orphans
check_request(ARGV[1], ARGV[2])
local was = redis.call('HMGET', KEYS[1], 'state', 'tenant')
if not was[1] or was[2] ~= ARGV[3] then
  return {'ABSENT'}
end
return {'OK', cancel_request(ARGV[1], ARGV[2], ARGV[4], server_ms())}
