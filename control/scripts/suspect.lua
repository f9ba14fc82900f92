-- A leader writes down what is in the step that may crash its group, and marks the requests that are suspected of it.
-- KEYS 1 lock (string)  2 epoch (string)  3 the replica's suspects (string)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 docket (JSON; '' when nobody is watched any more)
--      4 S (int), suspect rid × S, then the rids that are none any more
-- Returns {'OK'}, {'LOST', why} or {'FENCED', why}.
--@include fence
local base, count = ARGV[2], tonumber(ARGV[4])
local refused = fence(ARGV[1])
if refused then
  return refused
end
if ARGV[3] == '' then
  redis.call('DEL', KEYS[3])
else
  redis.call('SET', KEYS[3], ARGV[3], 'PX', SUSPECTS_MS)
end
for i = 5, #ARGV do
  local req = base .. 'req:' .. ARGV[i]
  if i - 4 > count then
    redis.call('HDEL', req, 'suspect')
  elseif redis.call('EXISTS', req) == 1 then
    redis.call('HSET', req, 'suspect', 1)
  end
end
return {'OK'}
