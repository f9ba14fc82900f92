-- The field `ended` of a request holds the choices that have ended, separated by spaces: so whoever ends the rest, or
-- adopts it, need not read its log.
local function ended_choices(ended)
  local found = {}
  for choice in string.gmatch(ended or '', '%d+') do
    found[tonumber(choice)] = true
  end
  return found
end

-- `ended` with the choices of the list `more` too.
local function with_ended(ended, more)
  local known, all = ended_choices(ended), {ended ~= '' and ended or nil}
  for _, choice in ipairs(more) do
    if not known[tonumber(choice)] then
      known[tonumber(choice)] = true
      all[#all + 1] = string.format('%d', choice)
    end
  end
  return table.concat(all, ' ')
end
