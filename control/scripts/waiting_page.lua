-- Count a page of what waits in a queue: the entries that no consumer has.
-- KEYS 1 queue (stream)
-- ARGV 1 id after which the page begins, '' for the first page  2 entries in a page (int)
-- Returns {id of the last entry, requests, their prompt tokens, their sequences, entries of the queue in all, running ones
--      too}. A page that is not full is the last.
--@keys stream
--@arguments entry? positive
local queue, after = KEYS[1], ARGV[1]
if after == '' then
  after = '0-0'
  for _, group in ipairs(redis.call('EXISTS', queue) == 1 and redis.call('XINFO', 'GROUPS', queue) or {}) do
    local found = {}
    for i = 1, #group, 2 do
      found[group[i]] = group[i + 1]
    end
    if found.name == GROUP then
      after = found['last-delivered-id']
    end
  end
end
local page, tokens, sequences = redis.call('XRANGE', queue, '(' .. after, '+', 'COUNT', ARGV[2]), 0, 0
for _, entry in ipairs(page) do
  after, tokens = entry[1], tokens + tonumber(entry[2][4])
  sequences = sequences + tonumber(entry[2][6] or '1')
end
return {after, #page, tokens, sequences, redis.call('XLEN', queue)}
