-- Functions that both repairs of a log share; needs clock, running, queue, drain, ended and ending.

-- End a request all of whose choices have ended in what was written, as `state`; '' leaves it open.
local function close_if_whole(base, rid, state, now)
  local was = redis.call('HMGET', base .. 'req:' .. rid, 'state', 'n', 'ended')
  if state == '' or (was[1] ~= 'queued' and was[1] ~= 'running') then
    return
  end
  local ended = ended_choices(was[3])
  for choice = 0, tonumber(was[2]) - 1 do
    if not ended[choice] then
      return
    end
  end
  close_request(base, rid, state, now)
end
