-- The tree of scheduler/order/fair.py in Redis, tag for tag; fair_queue.lua, which follows in the same script, works on it.
-- KEYS[1] is the prefix of all keys. Nodes are named by their path, joined with 0x1f:
--   n:<path>  hash: v virtual time, f finish tag, e entry in the parent's r, w weight, s when to look for idle children
--   r:<path>  sorted set: the ready children by start tag; "<arrival>\31<child>" breaks ties by arrival
--   c:<path>  set: all children that are remembered
--   q:<path>  list: ids of the items of a leaf
--   i:<id>    hash of an item; here its path, weights, cost
-- A child is ready, and has an entry, while there is anything below it.
local P, SEP = KEYS[1], "\31"
local IDLE_S = 3600 -- what a flow owes is forgotten when it had nothing to do for so long

local function key(kind, name) return P .. kind .. ":" .. name end
local function number(text) return tonumber(text or "0") or 0 end
local function exact(value) return string.format("%.17g", value) end
local function below(node, child) return node == "" and child or node .. SEP .. child end
local function busy(node) return redis.call("EXISTS", key("q", node), key("r", node)) > 0 end
local function child_of(member) return string.sub(member, 18) end

local function split(path)
  local parts = {}
  for part in string.gmatch(path, "[^" .. SEP .. "]+") do parts[#parts + 1] = part end
  return parts
end

-- The hashes of the nodes that this call has come to: read once, and written once, at its end (`write_nodes`).
local nodes, changed, arrivals = {}, {}, nil

local function load(name)
  local node = nodes[name]
  if not node then
    local found = redis.call("HMGET", key("n", name), "v", "f", "e", "w", "s")
    node = {v = number(found[1]), f = number(found[2]), e = found[3], w = number(found[4]), s = number(found[5])}
    node.known, node.entered = found[4], found[3]
    nodes[name] = node
  end
  return node
end

local function change(name)
  changed[name] = true
  return load(name)
end

local function weight(name) return math.max(1, load(name).w) end

-- A node with nothing to do is remembered for a while.
local function write_nodes()
  for name in pairs(changed) do
    local node, hash = nodes[name], key("n", name)
    redis.call("HSET", hash, "v", exact(node.v), "f", exact(node.f), "w", exact(node.w), "s", exact(node.s))
    if node.e then
      redis.call("HSET", hash, "e", node.e)
    elseif node.entered then
      redis.call("HDEL", hash, "e")
    end
    if node.e and not node.entered then
      redis.call("PERSIST", hash)
      redis.call("PERSIST", key("c", name))
    elseif not node.e and name ~= "" then
      redis.call("EXPIRE", hash, IDLE_S)
      redis.call("EXPIRE", key("c", name), IDLE_S)
    end
  end
  if arrivals then redis.call("SET", P .. "arrivals", string.format("%d", arrivals)) end
end

local function enter(node, child, start)
  arrivals = (arrivals or number(redis.call("GET", P .. "arrivals"))) + 1
  local member = string.format("%016d", arrivals) .. SEP .. child
  redis.call("ZADD", key("r", node), exact(start), member)
  change(below(node, child)).e = member
end

local function leave(node, child)
  local inner = change(below(node, child))
  if inner.e then redis.call("ZREM", key("r", node), inner.e) end
  inner.e = false
end

local function insert(id, path, weights)
  local node, weight_of = "", split(weights)
  for place, child in ipairs(split(path)) do
    local inner, share = below(node, child), number(weight_of[place])
    if not load(inner).known then
      redis.call("SADD", key("c", node), child)
      load(inner).known = true
    end
    if load(inner).w ~= share then change(inner).w = share end
    if not load(inner).e then enter(node, child, math.max(load(node).v, load(inner).f)) end
    node = inner
  end
  redis.call("RPUSH", key("q", path), id)
end

-- As FairTree._shift: of equals, the corrected one is last; who came in at the virtual time goes back with it.
local function shift_start(node, child, shift)
  local ready, member = key("r", node), load(below(node, child)).e
  local start = number(redis.call("ZSCORE", ready, member)) + shift
  redis.call("ZREM", ready, member)
  enter(node, child, start)
  if start >= load(node).v then return end
  change(node).v = start
  local later = redis.call("ZRANGEBYSCORE", ready, "(" .. exact(start), "+inf", "WITHSCORES")
  for i = 1, #later, 2 do
    local finish = load(below(node, child_of(later[i]))).f
    if finish < number(later[i + 1]) then redis.call("ZADD", ready, exact(math.max(finish, start)), later[i]) end
  end
end

local function correct(path, tokens)
  local node = ""
  for _, child in ipairs(split(path)) do
    if redis.call("SISMEMBER", key("c", node), child) == 0 then return end
    local inner = below(node, child)
    local shift = tokens / weight(inner)
    change(inner).f = load(inner).f + shift
    if load(inner).e then
      shift_start(node, child, shift)
    end
    node = inner
  end
end

local function drop(node)
  for _, child in ipairs(redis.call("SMEMBERS", key("c", node))) do drop(below(node, child)) end
  redis.call("DEL", key("n", node), key("r", node), key("c", node), key("q", node))
  nodes[node], changed[node] = nil, nil
end

-- Drop children that are empty and owe nothing: they would start at the virtual time anyway. Looked for when one has
-- become empty, and again only when there are twice as many, so that it costs little for each item.
local function forget_idle(node)
  local many = math.max(2 * redis.call("ZCARD", key("r", node)) + 64, load(node).s)
  if redis.call("SCARD", key("c", node)) <= many then return end
  for _, child in ipairs(redis.call("SMEMBERS", key("c", node))) do
    local inner = below(node, child)
    if not load(inner).e and load(inner).f <= load(node).v then
      drop(inner)
      redis.call("SREM", key("c", node), child)
    end
  end
  change(node).s = 2 * redis.call("SCARD", key("c", node))
end

local function first(node)
  local member = redis.call("ZRANGE", key("r", node), 0, 0)[1]
  return member and child_of(member)
end

-- The item, its cost, and whether there is more below `node`.
local function serve(node, prefix, depth)
  local head, start = unpack(redis.call("ZRANGE", key("r", node), 0, 0, "WITHSCORES"))
  local child = prefix[depth] or (head and child_of(head))
  if not child then
    local id = redis.call("LPOP", key("q", node))
    return id, number(redis.call("HGET", key("i", id), "cost")), busy(node)
  end
  local inner = below(node, child)
  local member = load(inner).e
  change(node).v = math.max(load(node).v, number(start))
  start = number(member == head and start or redis.call("ZSCORE", key("r", node), member))
  redis.call("ZREM", key("r", node), member)
  local id, cost, more = serve(inner, prefix, depth + 1)
  local finish = start + cost / weight(inner)
  change(inner).f = finish
  if more then
    enter(node, child, finish)
  else
    load(inner).e = false
    forget_idle(node)
  end
  return id, cost, more or busy(node)
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
