-- The tokens of one step: append to the logs, tell the followers, end what has ended, learn what was cancelled.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)
-- ARGV 1 token `owner:epoch`  2 the model's base key
--      3 the rows (JSON): [[rid, seq of the first entry (int), state at the end or '', tokens among the entries (int),
--        [entry (JSON as a string), …], [field, value, …] more for the request's hash], …]
-- Returns {'OK', now ms, {rid, next seq, …} behind, {cancelled rids}, {expired rids}, {taken rids}},
--      {'LOST', why}, {'FENCED', why} or {'POISONED', kind, message, rank}.
-- The hot path of the farm: per row one HMGET, one XADD per entry and one HSET; one PUBLISH per following api. The rows
-- are one argument because hundreds cost the client more to pack, and the server more to read, than all that is done here.
--@include clock
--@include fence
--@include poisoned
--@include turns
--@include queue
--@include drain
--@include ending
local token, base = ARGV[1], ARGV[2]
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end

local now = server_ms()
local stamp = whole(now)
local behind, cancelled, expired, taken = {}, {}, {}, {}
local events, charges = {}, {}

-- Append the entries after seq `last`, and remember them for the followers.
local function append(rid, last, entries, followers)
  local log = base .. 'log:' .. rid
  for i, entry in ipairs(entries) do
    redis.call('XADD', log, whole(last + i) .. '-0', 'e', entry)
  end
  if followers and followers ~= '' then
    local row = '["' .. rid .. '",[' .. table.concat(entries, ',') .. ']]'
    for api in string.gmatch(followers, '%S+') do
      local rows = events[api] or {}
      rows[#rows + 1] = row
      events[api] = rows
    end
  end
end

for _, row in ipairs(cjson.decode(ARGV[3])) do
  local rid, seq, done, tokens, entries, stamps = unpack(row)
  local count, req = #entries, base .. 'req:' .. rid
  local f = redis.call('HMGET', req, 'owner', 'state', 'seq', 'cancel', 'deadline', 'followers', 't_first',
    'completion_tokens', 'priority', 'tenant')
  if f[1] ~= token then
    taken[#taken + 1] = rid
  elseif tonumber(f[3]) + 1 ~= seq or f[2] ~= 'running' then
    -- Only the owner appends, so a log that ends where this row would end holds the row: the call came twice.
    if tonumber(f[3]) + 1 ~= seq + count then
      behind[#behind + 1] = rid
      behind[#behind + 1] = tonumber(f[3]) + 1
    end
  else
    local last = seq - 1
    if #stamps > 0 then
      redis.call('HSET', req, unpack(stamps))
    end
    if count > 0 then
      append(rid, last, entries, f[6])
      redis.call('HSET', req, 'seq', whole(last + count), 't_last', stamp, 'completion_tokens', whole(f[8] + tokens))
      if not f[7] then
        redis.call('HSET', req, 't_first', stamp)
        redis.call('PEXPIRE', base .. 'log:' .. rid, redis.call('PTTL', req))
      end
    end
    if tokens > 0 then
      local share = f[9] .. ' ' .. f[10]
      charges[share] = (charges[share] or 0) + tokens
    end
    if done ~= '' then
      close_request(base, rid, done, now)
    elseif f[4] == '1' then
      cancelled[#cancelled + 1] = rid
    elseif now >= tonumber(f[5]) then
      expired[#expired + 1] = rid
    end
  end
end

for share, tokens in pairs(charges) do
  local class, tenant = string.match(share, '^(%S+) (.*)$')
  charge(base, class, tenant, tokens)
end
for api, rows in pairs(events) do
  redis.call('PUBLISH', base .. 'events:' .. api, '[' .. table.concat(rows, ',') .. ']')
end
return {'OK', now, behind, cancelled, expired, taken}
