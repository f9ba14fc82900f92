-- One command to every rank of an epoch.
-- KEYS 1… command streams, one per rank
-- ARGV 1 seq (int)  2… the command (JSON): one for all, or one per key
-- Returns 'OK'. A command that is there already is left alone: the call may come twice.
--@keys stream…
--@arguments positive name name…
for i, stream in ipairs(KEYS) do
  local command = ARGV[i + 1] or ARGV[2]
  local added = redis.pcall('XADD', stream, 'MAXLEN', '~', COMMAND_LENGTH, ARGV[1] .. '-0', 'm', command)
  if type(added) == 'table' and added.err then
    local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    if not newest or tonumber(string.match(newest[1], '^%d+')) < tonumber(ARGV[1]) then
      return added
    end
  elseif ARGV[1] == '1' then
    redis.call('PEXPIRE', stream, COMMAND_MS)
  end
end
return 'OK'
