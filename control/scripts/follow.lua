-- An api process begins to follow a request, and reads what it lacks of the log in the same breath.
-- KEYS 1 request (hash)  2 log (stream)  3 orphans (zset)
-- ARGV 1 rid  2 api id or '' to look only  3 tenant  4 last seq that it has (int)  5 1 if it wants the params, else 0
--      6 entries at most (int)  7 the model's base key
-- Returns {'OK', {field, value, …} without params, {entries (JSON)}, params (JSON) or '', now (ms)} or {'ABSENT'}.
--@keys hash stream zset
--@arguments request:1 text text count flag positive base
--@include clock
--@include followers
local was = redis.call('HMGET', KEYS[1], 'state', 'tenant', 'followers')
if not was[1] or was[2] ~= ARGV[3] then
  return {'ABSENT'}
end
if was[1] == 'queued' or was[1] == 'running' then
--@include goes_on
  note_follower(ARGV[7], ARGV[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'followers', with_follower(was[3], ARGV[2]))
  if ARGV[2] ~= '' then
    redis.call('HDEL', KEYS[1], 'orphan_at')
    redis.call('ZREM', KEYS[3], ARGV[1])
  end
end
-- A prompt may be megabytes: it is read only where it is wanted.
local names, fields, params = {}, {}, ''
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if name ~= 'params' then
    names[#names + 1] = name
  elseif ARGV[5] == '1' and (was[1] == 'queued' or was[1] == 'running') then
    params = redis.call('HGET', KEYS[1], 'params')
  end
end
for i, value in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
  fields[2 * i - 1], fields[2 * i] = names[i], value
end
local entries = {}
for i, logged in ipairs(redis.call('XRANGE', KEYS[2], whole(tonumber(ARGV[4]) + 1) .. '-0', '+', 'COUNT', ARGV[6])) do
  entries[i] = logged[2][2]
end
return {'OK', fields, entries, params, server_ms()}
