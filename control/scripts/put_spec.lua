-- Make a specification the desired state; its revision grows only when something else in it changes.
-- KEYS 1 spec (hash)
-- ARGV 1 'change', 'again' for a new revision even so, or 'restore' to write only where there is none  2 revision to begin with (int)  3… field, value, …
-- Returns the revision that stands now.
local was = {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  was[flat[i]] = flat[i + 1]
end
local revision = was['revision']
if revision and ARGV[1] == 'restore' then
  return tonumber(revision)
end
local same, count = revision ~= nil, 0
for i = 3, #ARGV, 2 do
  same = same and was[ARGV[i]] == ARGV[i + 1]
  count = count + 1
end
if same and count == #flat / 2 - 1 and ARGV[1] ~= 'again' then
  return tonumber(revision)
end
local next_revision = revision and tonumber(revision) + 1 or tonumber(ARGV[2])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'revision', string.format('%d', next_revision), unpack(ARGV, 3))
return next_revision
