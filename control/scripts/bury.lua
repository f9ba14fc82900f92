-- A leader ends a request that crashed its group alone, and keeps it as a dead letter with all that
-- another try needs.
-- KEYS 1 lock (string)  2 epoch (string)  3 request (hash)  4 dead (stream)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 rid  4 cause
-- Returns {'OK', 1 if it is dead now, else 0}, {'LOST', why} or {'FENCED', why}.
--@keys string string hash stream
--@arguments token base request:3 text
--@model load orphans settlements classes
--@include clock
--@include fence
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
check_request(ARGV[2], ARGV[3])
local token, base, rid, cause = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local refused = fence(token)
if refused then
  return refused
end
local f = redis.call('HMGET', KEYS[3], 'owner', 'state', 'tenant', 'attempts', 'seq', 'params', 'replica', 'priority',
  'prompt_tokens', 'view')
if f[1] ~= token or f[2] ~= 'running' then
  return {'OK', f[2] == 'dead' and 1 or 0}
end
local now = server_ms()
redis.call('XADD', KEYS[4], 'MAXLEN', '~', DEAD_LENGTH, '*', 'rid', rid, 'tenant', f[3], 'cause', cause,
  'attempts', f[4], 'seq', f[5], 'replica', f[7] or '', 'at', whole(now), 'priority', f[8],
  'prompt_tokens', f[9], 'view', f[10] or '', 'params', f[6] or '')
end_request(base, rid, 'dead', 'error', cause, now)
return {'OK', 1}
