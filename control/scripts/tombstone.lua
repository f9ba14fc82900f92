-- Ask for a model to be unloaded; only this means unload, never the absence of a specification.
-- KEYS 1 spec (hash)
-- Returns 1, or 0 if there is no such model.
--@keys hash
--@arguments
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
if redis.call('HGET', KEYS[1], 'unload') ~= 'true' then
  redis.call('HSET', KEYS[1], 'unload', 'true')
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
end
return 1
