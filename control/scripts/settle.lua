-- Replace the estimate that a request was charged of its API key's limits by its true usage, once it has ended. While it
-- runs, charge its usage beyond the estimate.
-- KEYS 1 bucket (hash)  2 what the hold took (hash request id -> tokens)  3 open (hash hold -> `ms model`)
--      4 the key's record (hash)
-- ARGV 1 hold: the id under which it was taken  2 request id  3 tokens so far (int)  4 1 if it has ended, else 0
--      5 1 if it counts as a request, else 0
-- Returns 1, or 0 where it had been settled before.
--@keys hash hash hash hash
--@arguments word word count flag flag
--@include clock
--@include bucket
local tokens, ended, counts = tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5])
local charged = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '')
if not charged then
  return 0
end
local cost = ended and tokens or math.max(charged, tokens)
local limits = redis.call('HMGET', KEYS[4], 'rpm', 'tpm')
local rpm, tpm, now = tonumber(limits[1] or '0'), tonumber(limits[2] or '0'), server_ms()
local left_requests, left_tokens = read_levels(KEYS[1], rpm, tpm, now)
left_requests = rpm > 0 and math.min(rpm, left_requests + (ended and 1 - counts or 0)) or 0
left_tokens = tpm > 0 and math.min(tpm, left_tokens + charged - cost) or 0

if rpm > 0 or tpm > 0 then
  write_levels(KEYS[1], left_requests, left_tokens, rpm, tpm, now)
end
if ended then
  redis.call('HDEL', KEYS[2], ARGV[2])
  if redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('HDEL', KEYS[3], ARGV[1])
  end
else
  redis.call('HSET', KEYS[2], ARGV[2], whole(cost))
end
return 1
