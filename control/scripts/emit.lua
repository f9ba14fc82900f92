-- The tokens of one step: append to the logs, tell the followers, end what has ended, learn what was cancelled.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)
-- ARGV 1 token `owner:epoch`  2 the model's base key
--      3 the rows (JSON): [[rid, seq of the first entry (int), state at the end or '', tokens among the entries (int),
--        [entry (JSON as a string), …]], …]; rows that have any are longer: [field, value, …] more for the request's hash,
--        [choice that ends (int), …]
-- Returns {'OK', now ms, {rid, next seq, …} behind, {cancelled rids}, {expired rids}, {taken rids}, requests that wait},
--      {'LOST', why}, {'FENCED', why} or {'POISONED', kind, message, rank}.
-- The hot path of the farm: per row one HMGET, one XADD per entry and one HSET; one PUBLISH per following api. The rows
-- are one argument because hundreds cost the client more to pack, and the server more to read, than all that is done here.
--@keys any any any
--@arguments token base text
--@include clock
--@include fence
--@include poisoned
--@include turns
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
local LOT = 16
local token, base = ARGV[1], ARGV[2]
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end

-- The rows, and of each request what its hash holds: all that can be wrong with a row is found before the first write.
local ENDS = {[''] = true, finished = true, cancelled = true, expired = true}

local function all_are(list, kind)
  if type(list) ~= 'table' then
    return false
  end
  local count = #list
  for i = 1, count do
    if type(list[i]) ~= kind then
      return false
    end
  end
  return count > 0 or next(list) == nil
end

local function is_row(row)
  if type(row) ~= 'table' or (#row ~= 5 and #row ~= 7) then
    return false
  end
  local rid, seq, done, tokens, entries, stamps, ends = unpack(row, 1, 7)
  if type(rid) ~= 'string' or type(seq) ~= 'number' or not ENDS[done] or type(tokens) ~= 'number' then
    return false
  end
  return seq >= 1 and seq < 1e15 and tokens >= 0 and tokens < 1e15 and all_are(entries, 'string')
    and (not stamps or (all_are(stamps, 'string') and #stamps % 2 == 0 and all_are(ends, 'number')))
end

local read, rows = pcall(cjson.decode, ARGV[3])
if not read or type(rows) ~= 'table' then
  refuse('argument 3', ARGV[3], 'a list of rows')
end
local hashes = {}
for i, row in ipairs(rows) do
  if not is_row(row) then
    refuse('row', whole(i), 'a row')
  end
  local rid = row[1]
  hashes[rid] = redis.call('HMGET', base .. 'req:' .. rid, 'owner', 'state', 'seq', 'cancel', 'deadline', 'followers')
end

local now = server_ms()
local stamp = whole(now)
local behind, cancelled, expired, taken = {}, {}, {}, {}
local events, charges = {}, {}

-- Append the entries after seq `last`, and remember them for the followers.
local function append(rid, last, entries, followers)
  local log = base .. 'log:' .. rid
  for i, entry in ipairs(entries) do
    redis.call('XADD', log, (last + i) .. '-0', 'e', entry)
  end
  if followers ~= '' then
    local row = '["' .. rid .. '",[' .. table.concat(entries, ',') .. ']]'
    for api in string.gmatch(followers, '%S+') do
      local rows = events[api] or {}
      rows[#rows + 1] = row
      events[api] = rows
    end
  end
end

-- Entries count for a tenant's turn in whole lots, and the rest at the end: most rows need not look up whose they are.
local function count_for_turn(rid, req, before, after, done)
  local lots = (done ~= '' and after or after - after % LOT) - (before - before % LOT)
  if lots > 0 then
    local f = redis.call('HMGET', req, 'priority', 'tenant', 'hold', 'account', 'prompt_tokens', 'tokenless')
    local share = f[1] .. ' ' .. f[2]
    charges[share] = (charges[share] or 0) + lots
    if f[3] and f[3] ~= '' and done == '' and math.floor(after / SETTLE_TOKENS) > math.floor(before / SETTLE_TOKENS) then
      note_settlement(base, f[4], f[3], rid, tonumber(f[5]) + after - tonumber(f[6] or '0'), 0)
    end
  end
end

for _, row in ipairs(rows) do
  local rid, seq, done, tokens, entries, stamps, ends = unpack(row, 1, 7)
  local count, req = #entries, base .. 'req:' .. rid
  local f = hashes[rid]
  if f[1] ~= token then
    taken[#taken + 1] = rid
  elseif f[3] + 1 ~= seq or f[2] ~= 'running' then
    -- Only the owner appends, so a log that ends where this row would end holds the row: the call came twice.
    if f[3] + 1 ~= seq + count then
      behind[#behind + 1] = rid
      behind[#behind + 1] = f[3] + 1
    end
  else
    local last = seq - 1
    if stamps and #stamps > 0 then
      redis.call('HSET', req, unpack(stamps))
    end
    if ends and #ends > 0 then
      redis.call('HSET', req, 'ended', with_ended(redis.call('HGET', req, 'ended'), ends))
    end
    if count > 0 then
      append(rid, last, entries, f[6])
      redis.call('HSET', req, 'seq', last + count)
      f[3] = last + count -- a second row of the same request goes on from here
      if tokens < count then
        redis.call('HINCRBY', req, 'tokenless', count - tokens)
      end
      if last == 0 then
        redis.call('HSET', req, 't_first', stamp)
        account_for_first(base, req, now)
        redis.call('PEXPIRE', base .. 'log:' .. rid, redis.call('PTTL', req))
      end
    end
    count_for_turn(rid, req, last, last + count, done)
    if done ~= '' then
      f[2] = done
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
local waiting = tonumber(redis.call('HGET', base .. 'load', 'queued') or '0')
return {'OK', now, behind, cancelled, expired, taken, waiting}
