-- The field `followers` of a request holds the ids of the api processes that follow it, separated by spaces: emit
-- reads it with the same HMGET as everything else of the request.
local function with_follower(followers, api)
  if api == '' then
    return followers or ''
  end
  for known in string.gmatch(followers or '', '%S+') do
    if known == api then
      return followers
    end
  end
  if not followers or followers == '' then
    return api
  end
  return followers .. ' ' .. api
end

-- `followed:<api>` holds the live requests that an api process follows, so that those of one that died are found.
local function note_follower(base, api, rid)
  if api ~= '' then
    redis.call('ZADD', base .. 'followed:' .. api, 0, rid)
  end
end

local function forget_follower(base, api, rid)
  redis.call('ZREM', base .. 'followed:' .. api, rid)
end

local function without_follower(followers, api)
  local kept = {}
  for known in string.gmatch(followers or '', '%S+') do
    if known ~= api then
      kept[#kept + 1] = known
    end
  end
  return table.concat(kept, ' ')
end
