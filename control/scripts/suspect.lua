-- A leader writes down what is in the step that may crash its group, and marks the requests that are suspected of it.
-- KEYS 1 lock (string)  2 epoch (string)  3 the model's docket (hash)  4 trial (string)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id
--      4 docket (JSON; '' when nobody is watched any more); the dockets that the replica inherited are part of it
--      5 S (int), suspect rid × S, then the rids that are none any more
-- Returns {'OK'}, {'LOST', why} or {'FENCED', why}.
--@keys string string hash string
--@arguments token base word json? count word…
--@include fence
--@include docket
local base, replica, count = ARGV[2], ARGV[3], tonumber(ARGV[5])
if count > #ARGV - 5 then
  refuse('argument 5', ARGV[5], 'a number of the suspects that follow')
end
for i = 6, #ARGV do
  check_type(base .. 'req:' .. ARGV[i], 'hash')
end
local refused = fence(ARGV[1])
if refused then
  return refused
end
for _, name in ipairs(inherited_by(KEYS[3], replica)) do
  redis.call('HDEL', KEYS[3], name)
end
local tries = redis.call('GET', KEYS[4]) == replica
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[3], replica)
  if tries then
    redis.call('UNLINK', KEYS[4])
  end
else
  redis.call('HSET', KEYS[3], replica, ARGV[4])
  redis.call('PEXPIRE', KEYS[3], SUSPECTS_MS)
  if tries then
    redis.call('PEXPIRE', KEYS[4], TRIAL_MS)
  end
end
for i = 6, #ARGV do
  local req = base .. 'req:' .. ARGV[i]
  if i - 5 > count then
    redis.call('HDEL', req, 'suspect')
  elseif redis.call('EXISTS', req) == 1 then
    redis.call('HSET', req, 'suspect', 1)
  end
end
return {'OK'}
