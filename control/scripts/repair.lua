-- After a failover that lost the newest writes, a log can be shorter than what a client was given, or a leader that took
-- the request up again can have begun to write something else. What was given stands: bring the log to it.
-- KEYS 1 request (hash)  2 log (stream)
-- ARGV 1 the model's base key  2 rid  3 tenant  4 api id  5… what the api has (JSON), from seq 1
-- Returns {'OK', 'same' | 'appended' | 'replaced'}, {'OTHER', api id} or {'ABSENT'}.
--
-- Appending takes nothing from the leader: what an api has, a leader emitted. One that still has it in memory learns at
-- its next emit where the log is and goes on from there. Replacing takes the request away from it: another claim
-- continues from the new log. Where two apis have different things only the first one's stands; the other is told.
--@include clock
--@include bell
--@include turns
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include requeue
local base, rid, have = ARGV[1], ARGV[2], #ARGV - 4
local was = redis.call('HMGET', KEYS[1], 'state', 'tenant', 'n', 'repaired_by')
if not was[1] or was[2] ~= ARGV[3] then
  return {'ABSENT'}
end
local live = was[1] == 'queued' or was[1] == 'running'

local function known(value)
  return value ~= nil and value ~= cjson.null and value or false
end

-- Sequence number, choice, token and end are what an entry is; its text may be written in more than one way.
local function equal(one, other)
  if one == other then
    return true
  end
  local a, b = cjson.decode(one), cjson.decode(other)
  return a[1] == b[1] and a[2] == b[2] and known(a[3]) == known(b[3]) and known(a[4]) == known(b[4])
end

local logged, agrees = redis.call('XRANGE', KEYS[2], '-', '+'), true
for i = 1, math.min(#logged, have) do
  agrees = agrees and equal(logged[i][2][2], ARGV[4 + i])
end
local ended, finishes, completion = {}, {}, 0
for i = 1, have do
  local entry = cjson.decode(ARGV[4 + i])
  if known(entry[3]) ~= false then
    completion = completion + 1
  end
  if known(entry[4]) then
    ended[entry[2]], finishes[entry[4]] = true, true
  end
end

local function settle(what, seq)
  local ends = {}
  for choice in pairs(ended) do
    ends[#ends + 1] = choice
  end
  redis.call('HSET', KEYS[1], 'seq', whole(seq), 'tokenless', whole(seq - completion), 'ended', with_ended('', ends))
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
  local open = 0
  for choice = 0, tonumber(was[3]) - 1 do
    open = open + (ended[choice] and 0 or 1)
  end
  if live and open == 0 then
    local state = finishes['cancelled'] and 'cancelled' or finishes['expired'] and 'expired' or 'finished'
    close_request(base, rid, state, server_ms())
  end
  return {'OK', what}
end

if agrees and (live or #logged >= have) then
  for seq = #logged + 1, have do
    redis.call('XADD', KEYS[2], whole(seq) .. '-0', 'e', ARGV[4 + seq])
  end
  if #logged > have then
    return {'OK', 'same'}
  end
  return settle(#logged == have and 'same' or 'appended', have)
end

if known(was[4]) and was[4] ~= ARGV[4] then
  return {'OTHER', was[4]}
end
-- How it ended stays true of the choices whose end the api does not have.
local seq, ends = have, {}
for _, entry in ipairs(live and {} or logged) do
  local last = cjson.decode(entry[2][2])
  if known(last[4]) and not ended[last[2]] then
    seq, ended[last[2]] = seq + 1, true
    local cause = cjson.encode(known(last[5]) or last[4])
    ends[#ends + 1] = '[' .. whole(seq) .. ',' .. whole(last[2]) .. ',null,"' .. last[4] .. '",' .. cause .. ']'
  end
end
redis.call('DEL', KEYS[2])
for i = 1, have do
  redis.call('XADD', KEYS[2], whole(i) .. '-0', 'e', ARGV[4 + i])
end
for i, text in ipairs(ends) do
  redis.call('XADD', KEYS[2], whole(have + i) .. '-0', 'e', text)
end
redis.call('HSET', KEYS[1], 'repaired_by', ARGV[4])
if was[1] == 'running' then
  put_back(base, rid)
end
return settle('replaced', seq)
