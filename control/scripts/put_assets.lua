-- Store the assets of a model for API processes; a new epoch that publishes the same leaves `created` as it was.
-- KEYS 1 assets (hash)
-- ARGV field, value, …
-- Returns 1 if something changed, else 0.
--@keys hash
--@arguments word text text=text…
local count, same = 0, true
for i = 1, #ARGV, 2 do
  count = count + 1
  if ARGV[i] ~= 'created' then
    same = same and redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1]
  end
end
if same and redis.call('HLEN', KEYS[1]) == count then
  return 0
end
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
