-- Write a piece of an image of a request that is not queued yet; enqueue gives it the request's life.
-- KEYS 1 images (hash)
-- ARGV 1 field `image:piece`  2 the piece (base64)
-- Returns the number of pieces that are there now. A repeat writes the same, and shortens no life.
--@keys hash
--@arguments word word
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if redis.call('PTTL', KEYS[1]) < STAGED_MS then
  redis.call('PEXPIRE', KEYS[1], STAGED_MS)
end
return redis.call('HLEN', KEYS[1])
