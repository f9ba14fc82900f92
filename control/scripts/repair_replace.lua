-- A log that says something else than what a client was given, as after a failover that lost the newest writes: what was
-- given stands. It lies in a staged log, which takes the log's place here.
-- KEYS 1 request (hash)  2 log (stream)  3 staged log (stream)
-- ARGV 1 the model's base key  2 rid  3 tenant  4 api id  5 id of this repair, any text
--      6 the request's state as it was read  7 seq of the log's last entry as it was read (int)
--      8 seq of the staged log's last entry (int)  9 entries without a token in it (int)  10 choices that have ended in it
--      11 how the request ends where all of its choices have, '' where it does not
--      12… further ends (JSON lists without their seq: `choice,null,"finish","cause"]`), each after its choice
-- Returns {'OK'}, {'MOVED'} where the log is another one by now, {'OTHER', api id} or {'ABSENT'}.
-- Another claim continues from the new log, and the leader is told that the request is taken. Where two apis have
-- different things only the first one's stands; the other is told.
--@keys hash stream stream
--@arguments base request:1 text text text word count positive count choices finished|cancelled|expired| count=text…
--@model load bell orphans settlements classes
--@include clock
--@include bell
--@include turns
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include requeue
--@include staged
--@include repairing
check_request(ARGV[1], ARGV[2])
local base, rid, have = ARGV[1], ARGV[2], tonumber(ARGV[8])
local was = redis.call('HMGET', KEYS[1], 'state', 'tenant', 'seq', 'repaired_by', 'repair')
if not was[1] or was[2] ~= ARGV[3] then
  return {'ABSENT'}
end
if was[5] == ARGV[5] then
  return {'OK'} -- the same call again
end
if was[4] and was[4] ~= ARGV[4] then
  return {'OTHER', was[4]}
end
-- While it runs the log may have grown: what contradicts stands in it all the same.
local live, seq = was[1] == 'queued' or was[1] == 'running', tonumber(was[3])
if was[1] ~= ARGV[6] or seq < tonumber(ARGV[7]) or (not live and seq ~= tonumber(ARGV[7])) then
  return {'MOVED'}
end
if last_seq(KEYS[3]) ~= have then
  return {'MOVED'} -- it has lapsed
end
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[3], KEYS[2])
local last, more = have, {}
for choice in string.gmatch(ARGV[10], '%d+') do
  more[#more + 1] = choice
end
for i = 12, #ARGV, 2 do
  last = last + 1
  more[#more + 1] = ARGV[i]
  redis.call('XADD', KEYS[2], whole(last) .. '-0', 'e', '[' .. whole(last) .. ',' .. ARGV[i + 1])
end
redis.call('HSET', KEYS[1], 'repaired_by', ARGV[4], 'repair', ARGV[5], 'seq', whole(last),
  'tokenless', whole(tonumber(ARGV[9]) + last - have), 'ended', with_ended('', more))
redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
if was[1] == 'running' then
  put_back(base, rid)
end
close_if_whole(base, rid, ARGV[11], server_ms())
return {'OK'}
