-- The tree of scheduler/order/fair.py in Redis, tag for tag; fair_queue.lua, which follows in the same script, works on it.
-- KEYS[1] is the prefix of all keys. Nodes are named by their path, joined with 0x1f:
--   n:<path>  hash: v virtual time, f finish tag, e entry in the parent's r, w weight, s when to look for idle children
--   r:<path>  sorted set: the ready children by start tag; "<arrival>\31<child>" breaks ties by arrival
--   c:<path>  set: all children that are remembered
--   q:<path>  list: ids of the items of a leaf
--   i:<id>    hash of an item; here its path, weights, cost
local P, SEP = KEYS[1], "\31"
local IDLE_S = 3600 -- what a flow owes is forgotten when it had nothing to do for so long

local function key(kind, name) return P .. kind .. ":" .. name end
local function number(text) return tonumber(text or "0") or 0 end
local function exact(value) return string.format("%.17g", value) end
local function get(node, field) return number(redis.call("HGET", key("n", node), field) or "0") end
local function weight(node) return math.max(1, get(node, "w")) end
local function set(node, field, value) redis.call("HSET", key("n", node), field, exact(value)) end
local function below(node, child) return node == "" and child or node .. SEP .. child end
local function busy(node) return redis.call("EXISTS", key("q", node), key("r", node)) > 0 end
local function child_of(member) return string.sub(member, 18) end

local function split(path)
  local parts = {}
  for part in string.gmatch(path, "[^" .. SEP .. "]+") do parts[#parts + 1] = part end
  return parts
end

local function enter(node, child, start)
  local member = string.format("%016d", redis.call("INCR", P .. "arrivals")) .. SEP .. child
  redis.call("ZADD", key("r", node), exact(start), member)
  redis.call("HSET", key("n", below(node, child)), "e", member)
end

-- Nothing is to be done below a child of `node`, nor is it ready any more: it is remembered for a while.
local function rest(node, child)
  local inner = below(node, child)
  redis.call("HDEL", key("n", inner), "e")
  redis.call("EXPIRE", key("n", inner), IDLE_S)
  redis.call("EXPIRE", key("c", inner), IDLE_S)
end

local function leave(node, child)
  local member = redis.call("HGET", key("n", below(node, child)), "e")
  if member then redis.call("ZREM", key("r", node), member) end
  rest(node, child)
end

local function head_start(node) return number(redis.call("ZRANGE", key("r", node), 0, 0, "WITHSCORES")[2]) end

local function insert(id)
  local path, weights = unpack(redis.call("HMGET", key("i", id), "path", "weights"))
  local node, weight_of = "", split(weights)
  for place, child in ipairs(split(path)) do
    local inner = below(node, child)
    redis.call("SADD", key("c", node), child)
    redis.call("HSET", key("n", inner), "w", weight_of[place])
    if not busy(inner) then
      enter(node, child, math.max(get(node, "v"), get(inner, "f")))
      redis.call("PERSIST", key("n", inner))
      redis.call("PERSIST", key("c", inner))
    end
    node = inner
  end
  redis.call("RPUSH", key("q", path), id)
end

-- As FairTree._shift: of equals, the corrected one is last; who came in at the virtual time goes back with it.
local function shift_start(node, child, shift)
  local ready = key("r", node)
  local member = redis.call("HGET", key("n", below(node, child)), "e")
  local start = number(redis.call("ZSCORE", ready, member)) + shift
  redis.call("ZREM", ready, member)
  enter(node, child, start)
  if start >= get(node, "v") then return end
  set(node, "v", start)
  local later = redis.call("ZRANGEBYSCORE", ready, "(" .. exact(start), "+inf", "WITHSCORES")
  for i = 1, #later, 2 do
    local finish = get(below(node, child_of(later[i])), "f")
    if finish < number(later[i + 1]) then redis.call("ZADD", ready, exact(math.max(finish, start)), later[i]) end
  end
end

local function correct(path, tokens)
  local node = ""
  for _, child in ipairs(split(path)) do
    if redis.call("SISMEMBER", key("c", node), child) == 0 then return end
    local inner = below(node, child)
    local shift = tokens / weight(inner)
    set(inner, "f", get(inner, "f") + shift)
    if busy(inner) then
      shift_start(node, child, shift)
    end
    node = inner
  end
end

local function drop(node)
  for _, child in ipairs(redis.call("SMEMBERS", key("c", node))) do drop(below(node, child)) end
  redis.call("DEL", key("n", node), key("r", node), key("c", node), key("q", node))
end

-- Drop children that are empty and owe nothing: they would start at the virtual time anyway. Looked for again only
-- when there are twice as many, so that it costs little for each item.
local function forget_idle(node)
  local many = math.max(2 * redis.call("ZCARD", key("r", node)) + 64, get(node, "s"))
  if redis.call("SCARD", key("c", node)) <= many then return end
  local virtual = get(node, "v")
  for _, child in ipairs(redis.call("SMEMBERS", key("c", node))) do
    local inner = below(node, child)
    if not busy(inner) and get(inner, "f") <= virtual then
      drop(inner)
      redis.call("SREM", key("c", node), child)
    end
  end
  set(node, "s", 2 * redis.call("SCARD", key("c", node)))
end

local function first(node)
  local member = redis.call("ZRANGE", key("r", node), 0, 0)[1]
  return member and child_of(member)
end

local function serve(node, prefix, depth)
  local child = prefix[depth] or first(node)
  if not child then
    local id = redis.call("LPOP", key("q", node))
    return id, number(redis.call("HGET", key("i", id), "cost"))
  end
  local inner = below(node, child)
  local member = redis.call("HGET", key("n", inner), "e")
  local start = number(redis.call("ZSCORE", key("r", node), member))
  set(node, "v", math.max(get(node, "v"), head_start(node)))
  redis.call("ZREM", key("r", node), member)
  local id, cost = serve(inner, prefix, depth + 1)
  local finish = start + cost / weight(inner)
  set(inner, "f", finish)
  if busy(inner) then enter(node, child, finish) else rest(node, child) end
  forget_idle(node)
  return id, cost
end

local function find(prefix)
  local node = ""
  for _, child in ipairs(prefix) do node = below(node, child) end
  return busy(node) and node
end

local function unqueue(path, id)
  redis.call("LREM", key("q", path), 1, id)
  local parts = split(path)
  for depth = #parts, 1, -1 do
    local node = table.concat(parts, SEP, 1, depth)
    if busy(node) then return end
    leave(table.concat(parts, SEP, 1, depth - 1), parts[depth])
  end
end

local function count(node, most)
  local found, stack = 0, {node}
  while #stack > 0 and found < most do
    local here = table.remove(stack)
    found = found + redis.call("LLEN", key("q", here))
    for _, member in ipairs(redis.call("ZRANGE", key("r", here), 0, -1)) do stack[#stack + 1] = below(here, child_of(member)) end
  end
  return math.min(found, most)
end
