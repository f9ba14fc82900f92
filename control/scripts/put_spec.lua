-- Make a specification the desired state; its revision grows only when something changes that replicas can't follow.
-- KEYS 1 spec (hash)
-- ARGV 1 'change', 'again' for a new revision even so, or 'restore' to write only where there is none
--      2 revision to begin with (int)  3… field, value, …
-- Returns the revision that stands now.
-- Fields that placement, agents and leaders apply without a new process.
--@keys hash
--@arguments change|again|restore count word text text=text…
local FOLLOWED = {replicas = true, min_replicas = true, target_wait_s = true, idle_s = true, drain_s = true,
  surge = true, paused = true}
local was, rest = {}, {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  was[flat[i]] = flat[i + 1]
  rest[flat[i]] = true
end
local revision = was['revision']
if revision and ARGV[1] == 'restore' then
  return tonumber(revision)
end
local grows = ARGV[1] == 'again'
for i = 3, #ARGV, 2 do
  rest[ARGV[i]] = nil
  grows = grows or (was[ARGV[i]] ~= ARGV[i + 1] and not FOLLOWED[ARGV[i]])
end
for name in pairs(rest) do
  grows = grows or (name ~= 'revision' and not FOLLOWED[name])
end
local next_revision = tonumber(revision or ARGV[2])
if revision and grows then
  next_revision = next_revision + 1
end
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[1], 'revision', string.format('%d', next_revision), unpack(ARGV, 3))
return next_revision
