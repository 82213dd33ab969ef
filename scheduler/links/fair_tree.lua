-- The tree of scheduler/order/fair.py in Redis, tag for tag; fair_queue.lua, which follows in the same library, works on it.
-- P is the prefix of all keys. Nodes are named by their path, joined with 0x1f:
--   n:<path>  MessagePack: virtual time, finish tag, weight, when to look for idle children, entry in the parent's r
--   r:<path>  sorted set: the ready children by start tag; "<arrival>\31<child>" breaks ties by arrival
--   c:<path>  set: all children that are remembered
--   q:<path>  list: ids of the items of a leaf
--   i:<id>    hash of an item; here its path, cost, slots, adapter, body
-- A child is ready, and has an entry, while there is anything below it.
local P, SEP = nil, "\31"
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

-- The nodes that this call has come to: read once, and written once, at its end (`write_nodes`).
local nodes, changed, arrivals
-- What is said of the items that it hands out: read once.
local items

local function begin_tree(prefix)
  P, nodes, changed, arrivals, items = prefix, {}, {}, nil, {}
end

local function note(name, found)
  local node = {v = 0, f = 0, w = 0, s = 0, e = false, known = found}
  if found then node.v, node.f, node.w, node.s, node.e = cmsgpack.unpack(found) end
  node.entered = node.e
  nodes[name] = node
  return node
end

local function load(name) return nodes[name] or note(name, redis.call("GET", key("n", name))) end

-- The nodes on the way to a path, at once.
local function load_way(parts)
  local names, keys, node = {""}, {key("n", "")}, ""
  for _, child in ipairs(parts) do
    node = below(node, child)
    names[#names + 1], keys[#keys + 1] = node, key("n", node)
  end
  if nodes[node] then return end
  for place, found in ipairs(redis.call("MGET", unpack(keys))) do
    if not nodes[names[place]] then note(names[place], found) end
  end
end

local function change(name)
  changed[name] = true
  return load(name)
end

local function weight(name) return math.max(1, load(name).w) end

-- A node with nothing to do is remembered for a while; who writes it without a time to live takes that away.
local function write_nodes()
  local kept = {}
  for name in pairs(changed) do
    local node, place = nodes[name], key("n", name)
    local packed = cmsgpack.pack(node.v, node.f, node.w, node.s, node.e)
    if node.e or name == "" then
      kept[#kept + 1], kept[#kept + 2] = place, packed
    else
      redis.call("SET", place, packed, "EX", IDLE_S)
    end
    if not node.leaf and name ~= "" then
      if not node.e then
        redis.call("EXPIRE", key("c", name), IDLE_S)
      elseif not node.entered then
        redis.call("PERSIST", key("c", name))
      end
    end
    if #kept > 1000 then
      redis.call("MSET", unpack(kept))
      kept = {}
    end
  end
  if arrivals then kept[#kept + 1], kept[#kept + 2] = P .. "arrivals", string.format("%d", arrivals) end
  if #kept > 0 then redis.call("MSET", unpack(kept)) end
end

local function item_of(id)
  local item = items[id]
  if not item then
    local path, cost, slots, adapter, body = unpack(redis.call("HMGET", key("i", id), "path", "cost", "slots", "adapter", "body"))
    item = {path = path, cost = number(cost), slots = math.max(1, number(slots)), adapter = adapter, body = body}
    items[id] = item
  end
  return item
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
  local node, weight_of, parts = "", split(weights), split(path)
  load_way(parts)
  for place, child in ipairs(parts) do
    local inner, share = below(node, child), number(weight_of[place])
    if not load(inner).known then
      redis.call("SADD", key("c", node), child)
      load(inner).known = true
    end
    if load(inner).w ~= share then change(inner).w = share end
    if not load(inner).e then enter(node, child, math.max(load(node).v, load(inner).f)) end
    node = inner
  end
  load(path).leaf = true
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
  local node, parts = "", split(path)
  load_way(parts)
  for _, child in ipairs(parts) do
    local inner = below(node, child)
    if not load(inner).known then return end
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
  local many = redis.call("SCARD", key("c", node))
  if many <= math.max(64, load(node).s) or many <= 2 * redis.call("ZCARD", key("r", node)) + 64 then return end
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

-- The path of the next item at or below a node that has any.
local function next_path(node)
  local child = first(node)
  while child do
    node = below(node, child)
    child = first(node)
  end
  return node
end

-- The child that is next, or `wanted`, leaves the ready ones. Returns it, its start tag, and that of the first.
local function leave_first(node, wanted)
  local ready = key("r", node)
  if not wanted then
    local head, start = unpack(redis.call("ZPOPMIN", ready))
    return head and child_of(head), number(start), number(start)
  end
  local head, start = unpack(redis.call("ZRANGE", ready, 0, 0, "WITHSCORES"))
  local member, own = load(below(node, wanted)).e, start
  if member ~= head then own = redis.call("ZSCORE", ready, member) end
  redis.call("ZREM", ready, member)
  return wanted, number(own), number(start)
end

-- The item, its cost, and whether there is more below `node`.
local function serve(node, prefix, depth)
  local child, start, least = leave_first(node, prefix[depth])
  if not child then
    load(node).leaf = true
    local id = redis.call("LPOP", key("q", node))
    return id, item_of(id).cost, busy(node)
  end
  local inner = below(node, child)
  change(node).v = math.max(load(node).v, least)
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
  load(path).leaf = true
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
