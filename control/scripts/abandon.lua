-- End a request that no leader will end: a waiting one, or one whose replica has no leader.
-- KEYS 1 request (hash)
-- ARGV 1 the model's base key  2 rid  3 cause  4 the state that it ends in, `cancelled` or `finished`
-- Returns 1 if it ended, 0 if it runs under a living leader, had ended before, or is gone.
--@keys hash
--@arguments base request:1 text cancelled|finished
--@model load orphans settlements classes
--@include clock
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
check_request(ARGV[1], ARGV[2])
local state = ARGV[4]
local was = redis.call('HMGET', KEYS[1], 'state', 'replica')
local led = was[1] == 'running' and redis.call('EXISTS', ARGV[1] .. was[2] .. ':lock') == 1
if led or (was[1] ~= 'queued' and was[1] ~= 'running') then
  return 0
end
end_request(ARGV[1], ARGV[2], state, 'unavailable', ARGV[3], server_ms())
return 1
