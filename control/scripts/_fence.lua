-- fence(token): nil while `token` holds the lock KEYS[1]; else the reply to give up with. KEYS[2] is the epoch.
-- LOST: the lock ran out but nobody has moved the epoch on, so the same process may acquire again.
-- FENCED: somebody else holds the lock, or has had it since.
local function epoch_of(token)
  return string.match(token, ':(%d+)$')
end

local function fence(token)
  local holder = redis.call('GET', KEYS[1])
  if holder == token then
    return nil
  end
  if holder then
    return {'FENCED', 'the lock is held by ' .. holder .. ', not by ' .. token}
  end
  local epoch = redis.call('GET', KEYS[2])
  if epoch and tonumber(epoch) > tonumber(epoch_of(token)) then
    return {'FENCED', 'the epoch moved on to ' .. epoch .. ' from ' .. token}
  end
  return {'LOST', 'the lock of ' .. token .. ' ran out'}
end
