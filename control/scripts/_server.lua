-- server_run(): the id of this run of the server, '' where it does not tell. A server that was started again, or another one
-- after a failover, may have lost the last writes; the same run has lost nothing.
local function server_run()
  local info = redis.pcall('INFO', 'server')
  return type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
end
