-- Forget a stored response.
-- KEYS 1 index (zset)  2 sizes (hash)
-- ARGV 1 the beginning of the records' keys  2 rid
-- Returns 1.
--@keys zset hash
--@arguments word word
--@include clock
--@include stored
stored(KEYS[1], KEYS[2], ARGV[1]).forget(ARGV[2])
return 1
