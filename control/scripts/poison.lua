-- Declare an epoch unfit to go on; the first to notice is remembered.
-- KEYS 1 poison (hash)  2 poisons, its history (stream)  3 epoch (string)
-- ARGV 1 epoch (int)  2 rank (int)  3 kind  4 message  5 the model's base key
-- Returns 1 if this call is the one that counts, 0 if the epoch was poisoned before or is over.
--@keys hash stream string
--@arguments count number text text base
--@model bell load
--@include clock
--@include bell
local epoch = redis.call('GET', KEYS[3])
if epoch and tonumber(epoch) > tonumber(ARGV[1]) then
  return 0
end
local was = redis.call('HMGET', KEYS[1], 'epoch', 'rank', 'kind', 'message')
if was[1] and tonumber(was[1]) >= tonumber(ARGV[1]) then
  local same = was[1] == ARGV[1] and was[2] == ARGV[2] and was[3] == ARGV[3] and was[4] == ARGV[4]
  return same and 1 or 0 -- the same words again are the same call
end
local at = whole(server_ms())
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'rank', ARGV[2], 'kind', ARGV[3], 'message', ARGV[4], 'at', at)
-- The history wakes those who wait for commands or replies, the bell those who wait for work.
redis.call('XADD', KEYS[2], 'MAXLEN', '~', POISONS_LENGTH, '*', 'epoch', ARGV[1], 'rank', ARGV[2], 'kind', ARGV[3],
  'message', ARGV[4])
redis.call('HINCRBY', ARGV[5] .. 'load', 'poisons:' .. ARGV[3], 1)
ring(ARGV[5], 'poison', '')
return 1
