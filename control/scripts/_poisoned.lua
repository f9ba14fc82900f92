-- poisoned(token): nil, or the reply to give up with because this epoch is poisoned. KEYS[3] is the poison. Needs fence.
local function poisoned(token)
  local poison = redis.call('HMGET', KEYS[3], 'epoch', 'kind', 'message', 'rank')
  if poison[1] and poison[1] == epoch_of(token) then
    return {'POISONED', poison[2], poison[3], poison[4]}
  end
  return nil
end
