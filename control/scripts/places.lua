-- The places of requests that only wait: queued, with an empty log, and followed by the api process that asks.
-- KEYS 1 load (hash)
-- ARGV 1 the model's base key  2 api id  3… rids, PLACES at most
-- Returns JSON, two numbers for each rid: its place from 1, or 0 if it does not only wait; ms for which it is still
-- expected to wait, or 0 where that is not known.
--@keys hash
--@arguments base word word…
--@include clock
local base, api, now = ARGV[1], ' ' .. ARGV[2] .. ' ', server_ms()
local claimed = tonumber(redis.call('HGET', KEYS[1], 'claimed') or '0')
local places = {}
for i = 3, math.min(#ARGV, 2 + PLACES) do
  local f = redis.call('HMGET', base .. 'req:' .. ARGV[i], 'state', 'seq', 'followers', 'ticket', 'expected', 't_enqueued')
  local place, rest = 0, 0
  if f[1] == 'queued' and f[2] == '0' and string.find(' ' .. f[3] .. ' ', api, 1, true) then
    place = math.max(1, tonumber(f[4]) - claimed)
    rest = f[5] and math.max(0, tonumber(f[5]) - (now - tonumber(f[6]))) or 0
  end
  places[#places + 1] = whole(place)
  places[#places + 1] = whole(rest)
end
return '[' .. table.concat(places, ',') .. ']'
