-- ring(base, why, rid): wake the leaders that wait with XREAD on the bell.
local function ring(base, why, rid)
  redis.call('XADD', base .. 'bell', 'MAXLEN', '~', BELL_LENGTH, '*', 'why', why, 'rid', rid)
end
