-- Write a piece of an image of a request that is not queued yet; enqueue gives it the request's life. The first piece
-- takes the bytes of all of them from what images of the model may take, and from what those of the tenant may.
-- KEYS 1 images (hash)  2 bytes of images (hash)
-- ARGV 1 the model's base key  2 rid  3 tenant  4 bytes of all pieces (int)
--      5 most bytes of the model (int), 0 for any  6 most bytes of a tenant (int)
--      7 field `image:piece`  8 the piece (bytes)
-- Returns {pieces that are there now, '', 0}, or {0, 'model' or 'tenant', bytes that are taken}. A repeat writes the
-- same, and shortens no life.
--@keys hash hash
--@arguments base word text count count count word name
local base, rid, tenant, bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

-- The bytes that images take now, of all and of the tenant. Requests whose images are gone, in whatever way, are forgotten.
local function taken()
  local all, own, known = 0, 0, redis.call('HGETALL', KEYS[2])
  for i = 1, #known, 2 do
    if redis.call('EXISTS', base .. 'images:' .. known[i]) == 0 then
      redis.call('HDEL', KEYS[2], known[i])
    else
      local size, owner = string.match(known[i + 1], '^(%d+) (.*)$')
      all = all + tonumber(size)
      own = own + (owner == tenant and tonumber(size) or 0)
    end
  end
  return all, own
end

if tonumber(ARGV[5]) > 0 and redis.call('HEXISTS', KEYS[2], rid) == 0 then
  local all, own = taken()
  if all + bytes > tonumber(ARGV[5]) then
    return {0, 'model', all}
  end
  if own + bytes > tonumber(ARGV[6]) then
    return {0, 'tenant', own}
  end
end
redis.call('HSET', KEYS[2], rid, ARGV[4] .. ' ' .. tenant)
redis.call('PEXPIRE', KEYS[2], 2 * 86400000)
redis.call('HSET', KEYS[1], ARGV[7], ARGV[8])
if redis.call('PTTL', KEYS[1]) < STAGED_MS then
  redis.call('PEXPIRE', KEYS[1], STAGED_MS)
end
return {redis.call('HLEN', KEYS[1]), '', 0}
