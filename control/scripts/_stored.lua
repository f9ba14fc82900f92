-- The stored responses of one owner. `index`: zset rid -> ms at which it lapses, so the least lately used comes first;
-- `sizes`: hash rid -> bytes, and under `total` their sum; `records`: the beginning of each record's key.
-- forget(rid): drop one, from the list of chats too. charge(rid, bytes, life, now): count it, and let it live on from now.
-- make_room(bytes, number, now): drop what has lapsed and then the oldest, BATCH at most, until the rest is within both
-- bounds; false where more must go. counted(): total bytes and number.
local BATCH = 64

local function stored(index, sizes, records)
  local here, chats = {}, string.gsub(records, 'record:$', 'chats')

  function here.counted()
    return tonumber(redis.call('HGET', sizes, 'total') or 0), redis.call('ZCARD', index)
  end

  function here.forget(rid)
    redis.call('ZREM', chats, rid)
    redis.call('UNLINK', records .. rid)
    redis.call('ZREM', index, rid)
    local size = tonumber(redis.call('HGET', sizes, rid))
    if size then
      redis.call('HDEL', sizes, rid)
      redis.call('HINCRBY', sizes, 'total', whole(-size))
    end
  end

  function here.charge(rid, bytes, life, now)
    local was = tonumber(redis.call('HGET', sizes, rid) or 0)
    redis.call('HSET', sizes, rid, whole(bytes))
    redis.call('HINCRBY', sizes, 'total', whole(bytes - was))
    redis.call('ZADD', index, whole(now + life), rid)
    redis.call('PEXPIRE', records .. rid, whole(life))
    here.outlive(life)
  end

  -- Both live as long as the last record that they count.
  function here.outlive(life)
    for _, key in ipairs({index, sizes}) do
      if redis.call('PTTL', key) < life then
        redis.call('PEXPIRE', key, whole(life))
      end
    end
  end

  function here.make_room(bytes, number, now)
    local total, count = here.counted()
    local oldest = redis.call('ZRANGE', index, 0, BATCH - 1, 'WITHSCORES')
    for i = 1, #oldest, 2 do
      if total <= bytes and count <= number and tonumber(oldest[i + 1]) > now then
        break
      end
      here.forget(oldest[i])
      total, count = here.counted()
    end
    return total <= bytes and count <= number
  end

  return here
end
