-- Take or keep a lock that one process of the farm holds at a time. A process that waits for it gets it from the holder,
-- which hands it over where it would keep it: between two turns of its own.
-- KEYS 1 lock (string): its holder, then after a line feed the one that waits
-- ARGV 1 holder  2 its life, ms (int)  3 1: wait for it, 0: do not
-- Returns 1 while the holder has it, 0 while another one does.
--@keys string
--@arguments name count flag
local value = redis.call('GET', KEYS[1])
local holder, waiting = value, nil
local cut = value and string.find(value, '\n', 1, true)
if cut then
  holder, waiting = string.sub(value, 1, cut - 1), string.sub(value, cut + 1)
end
if holder and holder ~= ARGV[1] then
  if ARGV[3] == '1' and not waiting then
    redis.call('SET', KEYS[1], holder .. '\n' .. ARGV[1], 'KEEPTTL')
  end
  return 0
end
redis.call('SET', KEYS[1], waiting or ARGV[1], 'PX', ARGV[2])
return waiting and 0 or 1
