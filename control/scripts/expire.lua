-- End a waiting request whose deadline has passed while no leader came for it.
-- KEYS 1 request (hash)
-- ARGV 1 the model's base key  2 rid
-- Returns the request's state, or false if it is gone. A running one is its leader's to end.
--@keys hash
--@arguments base request:1
--@model load orphans settlements classes
--@include clock
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
check_request(ARGV[1], ARGV[2])
local was = redis.call('HMGET', KEYS[1], 'state', 'deadline')
if was[1] == 'queued' and server_ms() >= tonumber(was[2]) then
  end_request(ARGV[1], ARGV[2], 'expired', 'expired', 'deadline passed', server_ms())
  return 'expired'
end
return was[1]
