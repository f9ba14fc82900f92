-- The model's docket: for each replica the JSON of what its leader wrote down before a step that may crash. A field
-- `heir/replica` is a docket that a given-up replica left, until its heir has made it part of its own.

-- The fields that `replica` has inherited. A docket has few fields: replicas that look into a crash, and their heirs.
local function inherited_by(docket, replica)
  local fields, prefix = {}, replica .. '/'
  for _, name in ipairs(redis.call('HKEYS', docket)) do
    if string.sub(name, 1, #prefix) == prefix then
      fields[#fields + 1] = name
    end
  end
  return fields
end

local function ended_by_poison(poisons, epoch)
  for _, entry in ipairs(redis.call('XREVRANGE', poisons, '+', '-', 'COUNT', POISONS_LENGTH)) do
    if tonumber(entry[2][2]) == epoch then -- the field `epoch` comes first
      return true
    end
  end
  return false
end

-- The requests of a replica without a leader that its docket `text` suspects: those that it names, and those of the step
-- that crashed which had not got on. So a judgement that no leader has made yet is anticipated.
local function suspected(base, replica, text, poisons)
  local found, docket = {}, cjson.decode(text)
  local goals = ended_by_poison(poisons, docket.epoch) and docket.tried or {}
  for _, list in ipairs({docket.guilty or {}, docket.rest or {}}) do
    for _, rid in ipairs(list) do
      goals[rid] = math.huge
    end
  end
  for rid, goal in pairs(goals) do
    local f = redis.call('HMGET', base .. 'req:' .. rid, 'state', 'replica', 'seq')
    if f[1] == 'running' and f[2] == replica and tonumber(f[3]) < goal then
      found[#found + 1] = rid
    end
  end
  return found
end
