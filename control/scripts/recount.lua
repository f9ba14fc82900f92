-- Put the counts of what waits right, unless something has begun or ceased to wait since it was counted.
-- KEYS 1 load (hash)
-- ARGV 1 the model's base key  2 `enqueued`, 3 `claimed` and 4 `moved` of the load before the count (int)
--      5 requests that wait  6 their prompt tokens  7–9 requests by class  10–12 sequences by class (int)
--      13… `class tenant`, each with the sequences of it that wait (int): those whose counts or turns are wrong
-- Returns {1, requests, tokens}, as they were counted until now; {0} where the queue has changed. A repeat writes the same.
--@keys hash
--@arguments base count count count count count count count count count count count name=count…
--@model load classes
--@include clock
--@include turns
--@include queue
local base, load, flows = ARGV[1], KEYS[1], {}
for i = 13, #ARGV, 2 do
  local class, tenant = string.match(ARGV[i], '^(%S+) (.*)$')
  local known = false
  for _, name in ipairs(CLASSES) do
    known = known or name == class
  end
  if not known then
    refuse('argument ' .. i, ARGV[i], 'a class and a tenant')
  end
  flows[#flows + 1] = {class, tenant, tonumber(ARGV[i + 1])}
end
local was = redis.call('HMGET', load, 'enqueued', 'claimed', 'moved', 'queued', 'queued_tokens')
for i = 1, 3 do
  if tonumber(was[i] or '0') ~= tonumber(ARGV[i + 1]) then
    return {0}
  end
end
redis.call('HSET', load, 'queued', ARGV[5], 'queued_tokens', ARGV[6])
for i, class in ipairs(CLASSES) do
  redis.call('HSET', load, 'queued:' .. class, ARGV[6 + i], 'sequences:' .. class, ARGV[9 + i])
end
for _, flow in ipairs(flows) do
  local class, tenant, sequences = unpack(flow)
  if sequences > 0 then
    redis.call('ZADD', base .. 'waiting:' .. class, whole(sequences), tenant)
    local turn = redis.call('ZSCORE', base .. 'turns:' .. class, tenant)
    if turn then
      redis.call('ZADD', base .. 'served:' .. class, 'NX', turn, tenant)
    else
      begin_waiting(base, class, tenant)
    end
  else
    redis.call('ZREM', base .. 'waiting:' .. class, tenant)
    redis.call('ZREM', base .. 'turns:' .. class, tenant)
    if redis.call('EXISTS', base .. 'queue:' .. class .. ':' .. tenant) == 0 then
      end_turns(base, class, tenant)
    end
  end
end
return {1, was[4] or '0', was[5] or '0'}
