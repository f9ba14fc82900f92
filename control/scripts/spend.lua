-- Charge the requests of one hold to their API key's limits, or refuse them where a limit has no room.
-- KEYS 1 bucket (hash)  2 what the hold took (hash request id -> tokens)  3 open (hash hold -> `ms model`)
-- ARGV 1 hold: the id of the first of the requests  2 requests per minute (int, 0: any)
--      3 tokens per minute (int, 0: any)  4 most at one time (int, 0: any)  5 model
--      6… of each request its id and its tokens, estimated (int)
-- Returns {'OK', remaining requests, ms until all, remaining tokens, ms until all}, or
--      {'LIMIT', 'requests' | 'tokens' | 'concurrent', ms to wait, …the same four}.
--@keys hash hash hash
--@arguments word count count count word word=count…
--@include clock
--@include bucket
local hold, rpm, tpm, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local count, cost, taken = 0, 0, {}
for i = 6, #ARGV, 2 do
  count, cost = count + 1, cost + tonumber(ARGV[i + 1])
  taken[#taken + 1] = ARGV[i]
  taken[#taken + 1] = whole(tonumber(ARGV[i + 1]))
end
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
redis.call('HSET', KEYS[2], unpack(taken))
redis.call('PEXPIRE', KEYS[2], SPENT_MS)
if most > 0 then
  redis.call('HSET', KEYS[3], hold, whole(now) .. ' ' .. ARGV[5])
  redis.call('PEXPIRE', KEYS[3], SPENT_MS)
end
return {'OK', told(requests, tokens, rpm, tpm)}
