-- whole(x): the decimal digits of a whole number. server_ms(): this server's clock.
local function whole(x)
  return string.format('%.0f', x)
end

local function server_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
