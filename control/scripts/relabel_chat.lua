-- Replace the metadata of a stored chat completion that has ended.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid  3 metadata (JSON)
-- Returns 1, or 0 where there is no such record. The quota holds at the next trim: metadata is small.
--@keys zset hash
--@arguments word word name
local record = ARGV[1] .. ARGV[2]
local was = redis.call('HMGET', record, 'kind', 'response')
if was[1] ~= 'chat' or not was[2] or not redis.call('ZSCORE', KEYS[1], ARGV[2]) then
  return 0
end
local more = #ARGV[3] - redis.call('HSTRLEN', record, 'metadata')
redis.call('HSET', record, 'metadata', ARGV[3])
redis.call('HINCRBY', KEYS[2], ARGV[2], string.format('%d', more))
redis.call('HINCRBY', KEYS[2], 'total', string.format('%d', more))
return 1
