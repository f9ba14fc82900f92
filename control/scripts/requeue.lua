-- A leader gives a request back, to be claimed by any replica; its log stays, so it goes on where it was.
-- KEYS 1 lock (string)  2 epoch (string)  3 request (hash)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 rid
-- Returns {'OK', 1 if it is waiting now, else 0}, {'LOST', why} or {'FENCED', why}.
--@keys string string hash
--@arguments token base request:3
--@model load bell classes
--@include clock
--@include fence
--@include bell
--@include turns
--@include running
--@include queue
--@include requeue
check_request(ARGV[2], ARGV[3])
local token, base, rid = ARGV[1], ARGV[2], ARGV[3]
local refused = fence(token)
if refused then
  return refused
end
local f = redis.call('HMGET', KEYS[3], 'owner', 'state')
if f[2] == 'queued' and f[1] == '' then
  return {'OK', 1} -- the same call again
end
if f[1] ~= token or f[2] ~= 'running' then
  return {'OK', 0}
end
put_back(base, rid)
return {'OK', 1}
