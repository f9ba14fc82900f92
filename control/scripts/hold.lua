-- Take or keep a lock that one process of the farm holds at a time.
-- KEYS 1 lock (string)
-- ARGV 1 holder  2 its life, ms (int)
-- Returns 1 while the holder has it, 0 while another one does.
--@keys string
--@arguments name count
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
