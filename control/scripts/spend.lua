-- A request takes its share of its API key's limits, or is refused by one that has no room.
-- KEYS 1 bucket (hash)  2 what this request took (string)  3 open (hash rid -> `ms model`)
-- ARGV 1 rid  2 requests (int)  3 tokens, estimated (int)  4 requests per minute (int, 0: any)
--      5 tokens per minute (int, 0: any)  6 most at one time (int, 0: any)  7 model
-- Returns {'OK', remaining requests, ms until all, remaining tokens, ms until all}, or
--      {'LIMIT', 'requests' | 'tokens' | 'concurrent', ms to wait, …the same four}.
--@include clock
--@include bucket
local rid, count, cost = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rpm, tpm, most = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = server_ms()
local requests, tokens = read_levels(KEYS[1], rpm, tpm, now)

if redis.call('EXISTS', KEYS[2]) == 1 then
  return {'OK', told(requests, tokens, rpm, tpm)}
end
if most > 0 and redis.call('HLEN', KEYS[3]) >= most then
  return {'LIMIT', 'concurrent', '1000', told(requests, tokens, rpm, tpm)}
end
local short = until_it_has(count, requests, rpm)
if short > 0 then
  return {'LIMIT', 'requests', whole(short), told(requests, tokens, rpm, tpm)}
end
short = until_it_has(cost, tokens, tpm)
if short > 0 then
  return {'LIMIT', 'tokens', whole(short), told(requests, tokens, rpm, tpm)}
end

requests, tokens = requests - (rpm > 0 and count or 0), tokens - (tpm > 0 and cost or 0)
write_levels(KEYS[1], requests, tokens, rpm, tpm, now)
redis.call('SET', KEYS[2], whole(count) .. ' ' .. whole(cost), 'PX', SPENT_MS)
if most > 0 then
  redis.call('HSET', KEYS[3], rid, whole(now) .. ' ' .. ARGV[7])
  redis.call('PEXPIRE', KEYS[3], SPENT_MS)
end
return {'OK', told(requests, tokens, rpm, tpm)}
