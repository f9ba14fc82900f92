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

local function without_follower(followers, api)
  local kept = {}
  for known in string.gmatch(followers or '', '%S+') do
    if known ~= api then
      kept[#kept + 1] = known
    end
  end
  return table.concat(kept, ' ')
end
