-- End a request of a model that is taken out of service: a waiting one, or one whose replica has no leader any more.
-- KEYS 1 request (hash)
-- ARGV 1 the model's base key  2 rid  3 cause
-- Returns 1 if it ended, 0 if it runs under a living leader, had ended before, or is gone.
--@include clock
--@include queue
--@include drain
--@include ending
local was = redis.call('HMGET', KEYS[1], 'state', 'replica')
local led = was[1] == 'running' and redis.call('EXISTS', ARGV[1] .. was[2] .. ':lock') == 1
if led or (was[1] ~= 'queued' and was[1] ~= 'running') then
  return 0
end
end_request(ARGV[1], ARGV[2], 'cancelled', 'error', ARGV[3], server_ms())
return 1
