-- A rank's answer to its leader.
-- KEYS 1 reply stream of the epoch
-- ARGV 1 the reply (JSON)
-- Returns the entry's id. A repeat adds a second copy, which the leader drops by its seq and rank.
--@keys stream
--@arguments name
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', COMMAND_LENGTH, '*', 'm', ARGV[1])
redis.call('PEXPIRE', KEYS[1], COMMAND_MS)
return id
