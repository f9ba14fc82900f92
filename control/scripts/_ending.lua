-- Ending a request; needs clock, running, queue, drain and ended.

-- Exponentially decaying estimate of how many requests end per second, over about half a minute.
local RATE_WINDOW_MS = 30000

local function count_end(base, now)
  local load = base .. 'load'
  local was = redis.call('HMGET', load, 'rate', 'rate_at')
  local elapsed = math.max(0, now - tonumber(was[2] or whole(now)))
  local rate = tonumber(was[1] or '0') * math.exp(-elapsed / RATE_WINDOW_MS) + 1000 / RATE_WINDOW_MS
  redis.call('HSET', load, 'rate', string.format('%.6f', rate), 'rate_at', whole(now))
  redis.call('HINCRBY', load, 'ended', 1)
end

-- Tell the account's API key what a request took of its limits: `tokens` in all once it has ended, else so far. The key
-- has a slot of its own, so any process reads this and applies it there.
local function note_settlement(base, account, hold, rid, tokens, ended)
  local settlements = base .. 'settlements'
  redis.call('XADD', settlements, '*', 'key', account, 'hold', hold, 'rid', rid, 'tokens', whole(tokens), 'ended', ended)
  redis.call('PEXPIRE', settlements, SPENT_MS)
end

-- Count the usage of an ended request under its account, in the model's slot and in the script that ends it, so that no
-- request is lost or counted twice. A request that was ended from outside before its first token is not counted.
local function count_usage(base, rid, account, prompt, state, now)
  if not account or account == '' then
    return
  end
  local was = redis.call('HMGET', base .. 'req:' .. rid, 'seq', 'tokenless', 'cached_tokens', 'hold')
  local completion, usage = tonumber(was[1]) - tonumber(was[2] or '0'), base .. 'usage:' .. whole(math.floor(now / 86400000))
  redis.call('HINCRBY', usage, account .. ':requests', 1)
  local served = completion > 0 or state == 'finished'
  if was[4] and was[4] ~= '' then
    note_settlement(base, account, was[4], rid, served and tonumber(prompt) + completion or 0, 1)
  end
  if served then
    redis.call('HINCRBY', usage, account .. ':prompt', prompt)
    redis.call('HINCRBY', usage, account .. ':cached', was[3] or '0')
    redis.call('HINCRBY', usage, account .. ':completion', whole(completion))
  end
  redis.call('PEXPIRE', usage, USAGE_MS)
end

-- Close a request, for every kind of end: remove it from the queue, drop its images, and its prompt unless it is kept,
-- and set its TTL to the retention, or to the time for which it is kept.
local function close_request(base, rid, state, now)
  local req = base .. 'req:' .. rid
  local was = redis.call('HMGET', req, 'state', 'priority', 'tenant', 'entry', 'prompt_tokens', 'idempotency', 'account',
    'replica', 'n', 'keep')
  local keep = tonumber(was[10] or '0')
  remove(base, was[2], was[3], was[4])
  if was[1] == 'queued' then
    count_out(base, rid, was[2], was[3], tonumber(was[5]), tonumber(was[9]))
  elseif was[1] == 'running' then
    redis.call('ZREM', running_on(base, was[8] or ''), place_of(rid, was[2], was[4], was[3]))
  end
  redis.call('HSET', req, 'state', state, 't_last', whole(now))
  redis.call('HDEL', req, 'orphan_at', 'suspect', keep == 0 and 'params' or 'orphan_at')
  redis.call('UNLINK', base .. 'images:' .. rid)
  redis.call('ZREM', base .. 'orphans', rid)
  redis.call('PEXPIRE', req, whole(math.max(keep, RETENTION_MS)))
  redis.call('PEXPIRE', base .. 'log:' .. rid, whole(math.max(keep, RETENTION_MS)))
  if was[6] and was[6] ~= '' then
    redis.call('PEXPIRE', base .. 'idem:' .. was[3] .. ':' .. was[6], RETENTION_MS)
  end
  count_usage(base, rid, was[7], was[5], state, now)
  count_end(base, now)
  if was[1] == 'running' then
    account_for_end(base, tonumber(was[9]))
  end
end

-- Choices that this call may still end. A script that ends several requests asks `may_end` before each one, and says that
-- there are more where it stopped: one call must not end HAND_OUT requests of 128 choices each.
local choices_left = HAND_OUT_CHOICES

local function may_end()
  return choices_left > 0
end

-- End a request that no leader will end: a final log entry for each choice that has none, told to its followers. The
-- field `ended` names the choices that have ended, so that the log need not be read.
local function end_request(base, rid, state, finish, cause, now)
  local req, log = base .. 'req:' .. rid, base .. 'log:' .. rid
  local was = redis.call('HMGET', req, 'seq', 'n', 'followers', 'ended')
  local seq, ended = tonumber(was[1]), ended_choices(was[4])
  local texts = {}
  for choice = 0, tonumber(was[2]) - 1 do
    if not ended[choice] then
      seq = seq + 1
      local text = '[' .. whole(seq) .. ',' .. whole(choice) .. ',null,"' .. finish .. '",' .. cjson.encode(cause) .. ']'
      redis.call('XADD', log, whole(seq) .. '-0', 'e', text)
      texts[#texts + 1] = text
    end
  end
  redis.call('HSET', req, 'seq', whole(seq), 'cause', cause)
  choices_left = choices_left - #texts
  if #texts > 0 then
    redis.call('HINCRBY', req, 'tokenless', #texts)
  end
  close_request(base, rid, state, now)
  if #texts > 0 then
    local event = '[["' .. rid .. '",[' .. table.concat(texts, ',') .. ']]]'
    for api in string.gmatch(was[3] or '', '%S+') do
      redis.call('PUBLISH', base .. 'events:' .. api, event)
    end
  end
end
