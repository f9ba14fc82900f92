-- Handing requests to a leader; needs queue. A request is handed over by id and seq alone: its prompt and its log are
-- read outside scripts, in pages. Only the owner appends to a log, so nothing changes meanwhile.

-- {rid, tenant, class, attempts, deadline, seq of the log's last entry, choices that have not ended, ms of the claim,
-- ms of the enqueueing, ms of the first token}
local function describe(base, rid)
  local f = redis.call('HMGET', base .. 'req:' .. rid, 'tenant', 'priority', 'attempts', 'deadline', 'seq', 'n', 'ended',
    't_claimed', 't_enqueued', 't_first')
  local open = tonumber(f[6])
  for _ in string.gmatch(f[7] or '', '%d+') do
    open = open - 1
  end
  return {rid, f[1], f[2], f[3], f[4], f[5], whole(open), f[8] or '0', f[9] or '0', f[10] or '0'}
end

-- The requests that the claim with this id handed out, if this call repeats it because its reply was lost; else nil.
local function repeated(base, token, last, call)
  local id, rids = string.match(redis.call('GET', last) or '', '^(%S+) ?(.*)$')
  if id ~= call then
    return nil
  end
  local again = {}
  for rid in string.gmatch(rids, '%S+') do
    local f = redis.call('HMGET', base .. 'req:' .. rid, 'owner', 'state')
    if f[1] == token and f[2] == 'running' then
      again[#again + 1] = describe(base, rid)
    end
  end
  return again
end

local function remember(last, call, claimed)
  if #claimed == 0 then
    return
  end
  local rids = {}
  for i, request in ipairs(claimed) do
    rids[i] = request[1]
  end
  redis.call('SET', last, call .. ' ' .. table.concat(rids, ' '), 'PX', COMMAND_MS)
end

local function last_bell(bell)
  local rung = redis.call('XREVRANGE', bell, '+', '-', 'COUNT', 1)
  return rung[1] and rung[1][1] or '0'
end

-- The field `epochs` of a request with one more: `replica:epoch:ms` of each hand-over, the oldest first. Only the newest
-- are kept, in MOST_EPOCHS bytes.
local MOST_EPOCHS = 1024

local function with_epoch(was, replica, token, now)
  local text = (was or '') .. (was and ' ' or '') .. replica .. ':' .. string.match(token, '%d+$') .. ':' .. whole(now)
  while #text > MOST_EPOCHS do
    text = string.match(text, '^%S+ (.*)$') or ''
  end
  return text
end
