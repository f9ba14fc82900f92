-- last_seq(log): the seq of a log's last entry, 0 where there is none.
local function last_seq(log)
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  return newest and tonumber(string.match(newest[1], '^%d+')) or 0
end
