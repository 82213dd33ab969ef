-- The workers of the fair queue in Redis, as scheduler/order/roster.py has them: who is there, what they hold, and
-- which of them an item is left to. fair_queue.lua follows in the same script.
--   w         sorted set of workers by deadline; size and room hashes of their slots when they last came, and of those
--             that are free: what they had, less what is left to them since
--   h:<worker> set of ids, m:<worker> set of models, k:<worker> sorted set of adapters by the epoch of their last lease

local function sign(worker, now, ttl, models)
  redis.call("ZADD", P .. "w", number(now) + number(ttl), worker)
  redis.call("DEL", key("m", worker))
  if #models > 0 then redis.call("SADD", key("m", worker), unpack(models)) end
end

local function hold(worker, adapter, epoch)
  if redis.call("ZADD", key("k", worker), epoch, adapter) == 1 then
    redis.call("ZREMRANGEBYRANK", key("k", worker), 0, -REMEMBERED - 1)
  end
end

local function forget_worker(worker)
  redis.call("DEL", key("h", worker), key("m", worker), key("k", worker), key("bell", worker))
  redis.call("HDEL", P .. "room", worker)
  redis.call("HDEL", P .. "size", worker)
  redis.call("ZREM", P .. "w", worker)
end

local function numbers(name)
  local found, flat = {}, redis.call("HGETALL", P .. name)
  for i = 1, #flat, 2 do found[flat[i]] = number(flat[i + 1]) end
  return found
end

-- The others that have come, in the order of their names; the slots and the free ones of all.
local function others_than(worker)
  local found = {names = {}, size = numbers("size"), room = numbers("room")}
  for other in pairs(found.room) do
    if other ~= worker then found.names[#found.names + 1] = other end
  end
  table.sort(found.names)
  return found
end

local function holds(worker, adapter) return redis.call("ZSCORE", key("k", worker), adapter) end
local function serves(worker, model) return redis.call("SISMEMBER", key("m", worker), model) == 1 end

-- As scheduler.order.roster.fullness.
local function fullness(free, slots) return 1 - free / slots end

-- What a worker holds: of each item the id, the epoch of its lease and its slots.
local function in_hand(worker)
  local flat, found = redis.call("SORT", key("h", worker), "BY", "nosort", "GET", "#", "GET", P .. "i:*->epoch",
    "GET", P .. "i:*->slots"), {}
  for i = 1, #flat, 3 do
    found[#found + 1] = {id = flat[i], epoch = flat[i + 1], slots = math.max(1, number(flat[i + 2]))}
  end
  return found
end

-- A worker asks for work, with so many slots free beside what it has `held`.
local function comes(worker, free, held)
  local slots = free
  for _, one in ipairs(held) do slots = slots + one.slots end
  redis.call("HSET", P .. "size", worker, slots)
end

-- Whether an item may suit another worker better: it needs an adapter that this one does not hold.
local function may_leave(id, worker)
  local adapter = item_of(id).adapter
  return adapter and adapter ~= "" and not holds(worker, adapter)
end

-- Which of the others holds the adapter of an item that `may_leave`, and is not much fuller: the emptiest.
local function better_for(id, worker, left, others)
  local adapter = item_of(id).adapter
  local model, best, least = split(item_of(id).path)[1], nil, fullness(left, others.size[worker]) + HEAD_START
  for _, other in ipairs(others.names) do
    local room = others.room[other]
    local full = fullness(room, others.size[other])
    if room > 0 and full < least and holds(other, adapter) and serves(other, model)
      and redis.call("HEXISTS", key("d", id), other) == 0 then
      best, least = other, full
    end
  end
  return best
end
