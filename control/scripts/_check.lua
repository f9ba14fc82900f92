-- Functions that the generated checks call. A refusal comes before the first write of a script.
local function refuse(what, value, wanted)
  value = string.gsub(string.sub(tostring(value), 1, 60), '%c', '?')
  error('REFUSED ' .. what .. ' "' .. value .. '" is not ' .. wanted .. '; nothing was written', 0)
end

local function check_type(key, wanted)
  local found = redis.call('TYPE', key)
  found = type(found) == 'table' and found.ok or found
  if found ~= wanted and found ~= 'none' then
    refuse('key', key, 'a ' .. wanted .. ' but a ' .. found)
  end
end

-- The number that a string key holds, 0 where it is absent.
local function number_in(key)
  local text = redis.call('GET', key) or '0'
  return tonumber(text) or refuse('key', key, 'a number but ' .. text)
end

-- A whole number that a double holds exactly, and Redis's integers do.
local function is_count(text)
  return #text <= 15 and string.find(text, '^%d+$') ~= nil
end

local function is_token(text)
  local epoch = string.match(text, '^.+:(%d+)$')
  return epoch ~= nil and #epoch <= 15
end

-- [seq, choice, …]: what every entry of a log begins with.
local function is_entry(text)
  local read, entry = pcall(cjson.decode, text)
  return read and type(entry) == 'table' and type(entry[1]) == 'number' and entry[1] >= 1
    and type(entry[2]) == 'number' and entry[2] >= 0 and entry[2] < 1e6
end

local function is_list(text)
  local read, list = pcall(cjson.decode, text)
  if not read or type(list) ~= 'table' then
    return false
  end
  for place, item in pairs(list) do
    if type(place) ~= 'number' or type(item) ~= 'string' then
      return false
    end
  end
  return true
end
