-- A server beyond its maxmemory refuses the first write of a script that may take memory, and none after another write.
-- So a script that continues what was admitted begins with a write that changes nothing: of a key that is never there, in
-- the slot of the script's own keys.
redis.call('UNLINK', string.find(KEYS[1], '{', 1, true) and KEYS[1] .. ':none' or 'furrow:{' .. KEYS[1] .. '}:none')
