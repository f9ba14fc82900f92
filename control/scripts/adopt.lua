-- A leader takes up what its replica runs: that of earlier epochs, and what a lost reply has hidden from it.
-- KEYS 1 lock (string)  2 epoch (string)  3 poison (hash)  4 bell (stream)
-- ARGV 1 token `owner:epoch`  2 the model's base key  3 replica id  4 place after which to begin, '' at first
--      5 fingerprint of the leader's weights, or '': what began with others is put back
-- Returns {'OK', last id of the bell, requests as claim does, place after which to go on, 1 for more, else 0},
--      {'LOST', why}, {'FENCED', why} or {'POISONED', kind, message, rank}.
-- At most HAND_OUT requests a call. A repeat hands out the same: they are the caller's by then, and stay.
--@keys string string hash stream
--@arguments token base word text text
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
local token, base, replica, after, weights = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local refused = fence(token) or poisoned(token)
if refused then
  return refused
end
local adopted, rest, more = adopt_batch(base, replica, replica, token, weights, after, server_ms())
return {'OK', last_bell(KEYS[4]), adopted, rest, more}
