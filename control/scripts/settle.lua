-- A request has ended: what it took of its API key's limits by estimate becomes what it took in truth.
-- KEYS 1 bucket (hash)  2 what this request took (string)  3 open (hash rid -> `ms model`)
-- ARGV 1 rid  2 requests (int)  3 tokens (int)  4 requests per minute (int, 0: any)  5 tokens per minute (int, 0: any)
-- Returns 1, or 0 where it had been settled before.
--@include clock
--@include bucket
local rpm, tpm = tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('HDEL', KEYS[3], ARGV[1])
local took = redis.call('GET', KEYS[2])
if not took then
  return 0
end
redis.call('DEL', KEYS[2])
local count, cost = string.match(took, '^(%d+) (%d+)$')
local now = server_ms()
local requests, tokens = read_levels(KEYS[1], rpm, tpm, now)
requests = rpm > 0 and math.min(rpm, requests + tonumber(count) - tonumber(ARGV[2])) or 0
tokens = tpm > 0 and math.min(tpm, tokens + tonumber(cost) - tonumber(ARGV[3])) or 0
write_levels(KEYS[1], requests, tokens, rpm, tpm, now)
return 1
