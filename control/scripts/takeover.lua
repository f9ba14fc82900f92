-- Take what was delivered to another replica whose lock is absent. If there was anything, move that replica's epoch on, so
-- that its leader, should it wake, is fenced.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)  4 the replica's last claim (string)  5 bell (stream)
--      6 the other's lock (string)  7 the other's epoch (string)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id  4 id of this call, any text  5 the other's id
--      6 place after which to begin, '' at first  7 fingerprint of the leader's weights, or ''
-- Returns as adopt does. At most HAND_OUT requests a call; each call checks the other's lock, and moves its epoch on.
--@keys string string hash string stream string string
--@arguments token base word word word text text
--@model load bell orphans settlements classes
--@include clock
--@include fence
--@include poisoned
--@include bell
--@include turns
--@include running
--@include queue
--@include drain
--@include ended
--@include ending
--@include requeue
--@include weights
--@include claimed
--@include adopting
local token, base, replica, other, after = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6]
check_type(running_on(base, replica), 'zset')
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end
local again = repeated(base, token, KEYS[4], ARGV[4])
if again then
  return {'OK', last_bell(KEYS[5]), again, after, 1} -- what this call took is not there any more: go on from the same place
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {'OK', last_bell(KEYS[5]), {}, after, 0}
end
local now, epoch = server_ms(), number_in(KEYS[7])
local adopted, rest, more = adopt_batch(base, other, replica, token, ARGV[7], after, now)
-- Only where something was taken: the ranks of a replica that is merely late would follow the epoch for nothing.
if #adopted > 0 then
  redis.call('SET', KEYS[7], whole(math.max(epoch + 1, now)))
end
remember(KEYS[4], ARGV[4], adopted)
return {'OK', last_bell(KEYS[5]), adopted, rest, more}
