-- The fair queue of scheduler/carriers/contract.py in Redis. Every call is one script, so it is atomic.
-- KEYS[1] is the prefix of all keys, ARGV[1] the call, the rest its arguments; times are milliseconds.
-- The tree is that of scheduler/fair.py, tag for tag; nodes are named by their path, joined with 0x1f:
--   n:<path>  hash: v virtual time, f finish tag, e entry in the parent's r, w weight, s when to look for idle children
--   r:<path>  sorted set: the ready children by start tag; "<arrival>\31<child>" breaks ties by arrival
--   c:<path>  set: all children that are remembered
--   q:<path>  list: ids of the items of a leaf
--   i:<id>    hash: path, weights, cost, slots, body, attempts; worker, epoch and at while it is leased; aside while it is
--             set aside; done once answered
--   d:<id>    hash: the workers that have declined an item, and why
--   a:<model> list: ids of items that are set aside for other workers; asides the set of these models
--   h:<worker> set of ids, m:<worker> set of models, w sorted set of workers by deadline, done a stream, given_up a set
--   of ids, bell a list that wakes idle workers
local P, SEP, LIVES, MAX_ASIDE = KEYS[1], "\31", 3, 256
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

local function ring()
  redis.call("LPUSH", P .. "bell", "1")
  redis.call("LTRIM", P .. "bell", 0, 63)
end

local function split(path)
  local parts = {}
  for part in string.gmatch(path, "[^" .. SEP .. "]+") do parts[#parts + 1] = part end
  return parts
end

local function enter(node, child, start)
  local member = string.format("%016d", redis.call("INCR", P .. "arrivals")) .. SEP .. child
  local inner = below(node, child)
  redis.call("ZADD", key("r", node), exact(start), member)
  redis.call("HSET", key("n", inner), "e", member)
  redis.call("PERSIST", key("n", inner))
  redis.call("PERSIST", key("c", inner))
end

local function leave(node, child)
  local inner = below(node, child)
  local name = key("n", inner)
  local member = redis.call("HGET", name, "e")
  if member then
    redis.call("ZREM", key("r", node), member)
    redis.call("HDEL", name, "e")
  end
  redis.call("EXPIRE", name, IDLE_S)
  redis.call("EXPIRE", key("c", inner), IDLE_S)
end

local function head_start(node) return number(redis.call("ZRANGE", key("r", node), 0, 0, "WITHSCORES")[2]) end

local function queue(id)
  local path, weights = unpack(redis.call("HMGET", key("i", id), "path", "weights"))
  local node, weight_of = "", split(weights)
  for place, child in ipairs(split(path)) do
    local inner = below(node, child)
    redis.call("SADD", key("c", node), child)
    redis.call("HSET", key("n", inner), "w", weight_of[place])
    if not busy(inner) then enter(node, child, math.max(get(node, "v"), get(inner, "f"))) end
    node = inner
  end
  redis.call("RPUSH", key("q", path), id)
  ring()
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
  leave(node, child)
  local id, cost = serve(inner, prefix, depth + 1)
  local finish = start + cost / weight(inner)
  set(inner, "f", finish)
  if busy(inner) then enter(node, child, finish) end
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

-- An item that is in nobody's hands leaves the place where it waits.
local function withdraw(id)
  local path, aside = unpack(redis.call("HMGET", key("i", id), "path", "aside"))
  if aside then
    redis.call("LREM", key("a", split(path)[1]), 1, id)
    redis.call("HDEL", key("i", id), "aside")
  else
    unqueue(path, id)
  end
end

-- Whether a worker is there that may serve an item; and whether one is there at all.
local function able(id, model)
  local any = false
  for _, worker in ipairs(redis.call("ZRANGE", P .. "w", 0, -1)) do
    if redis.call("SISMEMBER", key("m", worker), model) == 1 then
      any = true
      if redis.call("HEXISTS", key("d", id), worker) == 0 then return true, true end
    end
  end
  return false, any
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

local function release(worker)
  local ids, back = redis.call("SMEMBERS", key("h", worker)), {}
  local epoch = {}
  for _, id in ipairs(ids) do epoch[id] = number(redis.call("HGET", key("i", id), "epoch")) end
  table.sort(ids, function(a, b) return epoch[a] < epoch[b] end)
  for _, id in ipairs(ids) do
    local item = key("i", id)
    redis.call("HDEL", item, "worker", "epoch")
    if redis.call("HINCRBY", item, "attempts", 1) >= LIVES then
      redis.call("SADD", P .. "given_up", id)
    else
      local facts = redis.call("HMGET", item, "path", "cost")
      correct(facts[1], -number(facts[2]))
      queue(id)
      back[#back + 1] = id
    end
  end
  redis.call("DEL", key("h", worker), key("m", worker))
  redis.call("ZREM", P .. "w", worker)
  return back
end

-- Grows for ever, also over a Redis that has lost everything.
local function next_epoch()
  local epoch = redis.call("INCR", P .. "epochs")
  if epoch > 1 then return epoch end
  local time = redis.call("TIME")
  redis.call("SET", P .. "epochs", string.format("%d", time[1] * 1000 + math.floor(time[2] / 1000)))
  return redis.call("INCR", P .. "epochs")
end

local calls = {}

function calls.push(id, path, weights, cost, slots, body)
  local item = key("i", id)
  if redis.call("EXISTS", item) == 1 then return 0 end
  redis.call("HSET", item, "path", path, "weights", weights, "cost", cost, "slots", slots, "body", body)
  queue(id)
  return 1
end

function calls.correct(path, tokens)
  correct(path, number(tokens))
  return 1
end

function calls.peek(prefix)
  local node = find(split(prefix))
  if not node then return false end
  local child = first(node)
  while child do
    node = below(node, child)
    child = first(node)
  end
  return redis.call("LINDEX", key("q", node), 0)
end

function calls.remove(id)
  local item = key("i", id)
  if redis.call("EXISTS", item) == 0 then return 0 end
  if redis.call("HEXISTS", item, "worker") + redis.call("HEXISTS", item, "done") > 0 then return 0 end
  if redis.call("SISMEMBER", P .. "given_up", id) == 1 then return 0 end
  withdraw(id)
  redis.call("DEL", item, key("d", id))
  return 1
end

function calls.ahead(id, most)
  local path = redis.call("HGET", key("i", id), "path")
  local place = path and redis.call("LPOS", key("q", path), id)
  if not place then return false end
  most = number(most)
  local parts, ahead = split(path), math.min(place, most)
  for depth = #parts, 1, -1 do
    local node = table.concat(parts, SEP, 1, depth - 1)
    local own = redis.call("HGET", key("n", below(node, parts[depth])), "e")
    local turns, mine = ahead / weight(below(node, parts[depth])), false
    for _, member in ipairs(redis.call("ZRANGE", key("r", node), 0, -1)) do
      if ahead >= most then return most end
      if member == own then
        mine = true
      else
        local sibling = below(node, child_of(member))
        ahead = ahead + count(sibling, math.floor(turns * weight(sibling)) + (mine and 0 or 1))
      end
    end
  end
  return math.min(ahead, most)
end

local function take(worker, now, id)
  local item, epoch = key("i", id), string.format("%d", next_epoch())
  redis.call("HSET", item, "worker", worker, "epoch", epoch, "at", now)
  redis.call("SADD", key("h", worker), id)
  local facts = redis.call("HMGET", item, "path", "body", "slots")
  return {id, facts[1], facts[2], epoch}, math.max(1, number(facts[3]))
end

-- What others have declined goes first: it was next before anything that is still queued.
local function next_for(worker, models)
  local served = {}
  for _, model in ipairs(models) do
    for _, id in ipairs(redis.call("LRANGE", key("a", model), 0, MAX_ASIDE - 1)) do
      if redis.call("HEXISTS", key("d", id), worker) == 0 then
        withdraw(id)
        return id
      end
    end
    served[model] = redis.call("LLEN", key("a", model)) < MAX_ASIDE
  end
  for _, member in ipairs(redis.call("ZRANGE", key("r", ""), 0, -1)) do
    if served[child_of(member)] then return (serve("", {child_of(member)}, 1)) end
  end
end

function calls.lease(worker, now, ttl, slots, ...)
  local models, leases, left = {...}, {}, number(slots)
  redis.call("ZADD", P .. "w", number(now) + number(ttl), worker)
  redis.call("DEL", key("m", worker))
  if #models > 0 then redis.call("SADD", key("m", worker), ...) end
  while left > 0 do
    local id, size = next_for(worker, models)
    if not id then break end
    leases[#leases + 1], size = take(worker, now, id)
    left = left - size
  end
  return leases
end

function calls.renew(worker, now, ttl)
  if not redis.call("ZSCORE", P .. "w", worker) then return 0 end
  redis.call("ZADD", P .. "w", number(now) + number(ttl), worker)
  return 1
end

function calls.answer(id, epoch, result)
  local item = key("i", id)
  local held = redis.call("HMGET", item, "worker", "epoch")
  if not held[1] or held[2] ~= epoch then return 0 end
  redis.call("SREM", key("h", held[1]), id)
  redis.call("HDEL", item, "worker", "epoch", "body")
  redis.call("DEL", key("d", id))
  redis.call("HSET", item, "done", "1")
  local facts = redis.call("HMGET", item, "cost", "at")
  redis.call("XADD", P .. "done", "*", "id", id, "result", result, "cost", facts[1], "at", facts[2])
  return 1
end

function calls.decline(id, epoch, why)
  local item = key("i", id)
  local held = redis.call("HMGET", item, "worker", "epoch", "path")
  if not held[1] or held[2] ~= epoch then return false end
  redis.call("HSET", key("d", id), held[1], why)
  local model = split(held[3])[1]
  if not able(id, model) then return redis.call("HVALS", key("d", id)) end
  redis.call("SREM", key("h", held[1]), id)
  redis.call("HDEL", item, "worker", "epoch")
  redis.call("HSET", item, "aside", "1")
  redis.call("RPUSH", key("a", model), id)
  redis.call("SADD", P .. "asides", model)
  ring()
  return {}
end

function calls.forget(id, receipt)
  local item = key("i", id)
  local facts = redis.call("HMGET", item, "path", "worker", "done")
  if facts[2] then
    redis.call("SREM", key("h", facts[2]), id)
  elseif facts[1] and not facts[3] then
    withdraw(id)
  end
  redis.call("DEL", item, key("d", id))
  redis.call("SREM", P .. "given_up", id)
  if receipt ~= "" then
    redis.call("XACK", P .. "done", "settle", receipt)
    redis.call("XDEL", P .. "done", receipt)
  end
  return 1
end

function calls.expire(now)
  local back, declined = {}, {}
  for _, worker in ipairs(redis.call("ZRANGEBYSCORE", P .. "w", "-inf", "(" .. now)) do
    for _, id in ipairs(release(worker)) do back[#back + 1] = id end
  end
  for _, model in ipairs(redis.call("SMEMBERS", P .. "asides")) do
    local ids = redis.call("LRANGE", key("a", model), 0, -1)
    if #ids == 0 then redis.call("SREM", P .. "asides", model) end
    for _, id in ipairs(ids) do
      local one, any = able(id, model)
      if any and not one then declined[#declined + 1] = {id, redis.call("HVALS", key("d", id))} end
    end
  end
  return {back, redis.call("SMEMBERS", P .. "given_up"), declined}
end

return calls[ARGV[1]](unpack(ARGV, 2))
