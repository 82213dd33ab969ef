-- The fair queue of scheduler/links/contract.py in Redis, upon fair_tree.lua and roster.lua. Every call is one of
-- the library's function, so it is atomic: the key is the prefix of all, the first argument says which call it is; times
-- are milliseconds, "" for the present one of this Redis. The constants are the contract's.
--   i:<id>    hash: path, weights, cost, slots, adapter, body, op, attempts; worker, epoch and at while it is
--             leased; aside while it is set aside; done once answered
--   flows     hash: by flow (a path without its lane), how many of its items are leased
--   d:<id>    hash: the workers that have declined an item, and why
--   a:<model> list: ids of items that are set aside for other workers; asides the set of these models
--   t:<model> hash: until when such an item is left to one worker, and to which, by id
--   done a stream, given_up a set of ids, bell:<worker> a list that wakes this worker, b:<model> one that wakes one that
--   serves this model; watch: who looks again soon for what is left to others, and until when

local function clock(now)
  if now ~= "" then return now end
  local time = redis.call("TIME")
  return string.format("%d", time[1] * 1000 + math.floor(time[2] / 1000))
end

local struck -- once in a call is enough: a bell that was struck wakes one

local function strike(bell)
  if struck[bell] then return end
  struck[bell] = true
  redis.call("LPUSH", bell, "1")
  redis.call("LTRIM", bell, 0, 0)
  redis.call("EXPIRE", bell, 60)
end

-- Wakes one worker: it takes all that it has slots for, and wakes another one if there is more.
local function ring(model) strike(key("b", model)) end

local function queue(id, path, weights)
  insert(id, path, weights)
  ring(split(path)[1])
end

-- An item that is in nobody's hands leaves the place where it waits.
local function withdraw(id)
  local path, aside = unpack(redis.call("HMGET", key("i", id), "path", "aside"))
  if aside then
    redis.call("LREM", key("a", split(path)[1]), 1, id)
    redis.call("HDEL", key("t", split(path)[1]), id)
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

local function flow_of(path) return string.match(path, "^(.*)" .. SEP) or "" end

-- An item, of which `path` and `worker` are known, leaves that worker's hands.
local function let_go(id, path, worker)
  redis.call("SREM", key("h", worker), id)
  redis.call("HDEL", key("i", id), "worker", "epoch")
  if redis.call("HINCRBY", P .. "flows", flow_of(path), -1) < 1 then
    redis.call("HDEL", P .. "flows", flow_of(path))
  end
end

-- Its holder has died over an item. Whether it is queued again.
local function lose(id, worker)
  local item = key("i", id)
  local facts = redis.call("HMGET", item, "path", "cost", "weights")
  let_go(id, facts[1], worker)
  if redis.call("HINCRBY", item, "attempts", 1) >= LIVES then
    redis.call("SADD", P .. "given_up", id)
    return false
  end
  correct(facts[1], -number(facts[2]))
  queue(id, facts[1], facts[3])
  return true
end

local function release(worker)
  local ids, back = redis.call("SMEMBERS", key("h", worker)), {}
  local epoch = {}
  for _, id in ipairs(ids) do epoch[id] = number(redis.call("HGET", key("i", id), "epoch")) end
  table.sort(ids, function(a, b) return epoch[a] < epoch[b] end)
  for _, id in ipairs(ids) do
    if lose(id, worker) then back[#back + 1] = id end
  end
  forget_worker(worker)
  return back
end

-- Grows for ever, also over a Redis that has lost everything. Written at the end of the call.
local epoch

local function next_epoch()
  epoch = epoch or number(redis.call("GET", P .. "epochs"))
  if epoch == 0 then
    local time = redis.call("TIME")
    epoch = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  epoch = epoch + 1
  return string.format("%d", epoch)
end

-- Receipts of answers that nobody is to have any more: taken away together, at the end of the call.
local receipts

local function write_the_rest()
  if epoch then redis.call("SET", P .. "epochs", string.format("%d", epoch)) end
  if #receipts > 0 then
    redis.call("XACK", P .. "done", "settle", unpack(receipts))
    redis.call("XDEL", P .. "done", unpack(receipts))
  end
end

local calls = {}

function calls.push(id, path, weights, cost, slots, adapter, body, op)
  local item = key("i", id)
  if redis.call("EXISTS", item) == 1 then return 0 end
  redis.call("HSET", item, "path", path, "weights", weights, "cost", cost, "slots", slots, "adapter", adapter,
    "body", body, "op", op)
  queue(id, path, weights)
  return 1
end

function calls.correct(path, tokens)
  correct(path, number(tokens))
  return 1
end

function calls.peek(prefix)
  local node = find(split(prefix))
  if not node then return false end
  return redis.call("LINDEX", key("q", next_path(node)), 0)
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
    local own = load(below(node, parts[depth])).e
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

local function set_aside(id)
  local model = split(item_of(id).path)[1]
  redis.call("HSET", key("i", id), "aside", "1")
  redis.call("RPUSH", key("a", model), id)
  redis.call("SADD", P .. "asides", model)
  return model
end

local function leave_to(worker, id, now, others)
  redis.call("HSET", key("t", set_aside(id)), id, string.format("%d ", number(now) + LEFT_MS) .. worker)
  others.room[worker] = redis.call("HINCRBY", P .. "room", worker, -item_of(id).slots)
  strike(key("bell", worker))
end

local function take(worker, now, id)
  local item, of_lease = item_of(id), next_epoch()
  redis.call("HSET", key("i", id), "worker", worker, "epoch", of_lease, "at", now)
  redis.call("SADD", key("h", worker), id)
  redis.call("HINCRBY", P .. "flows", flow_of(item.path), 1)
  if item.adapter and item.adapter ~= "" then hold(worker, item.adapter, of_lease) end
  return {id, item.path, item.body, of_lease}, item.slots
end

-- What this worker was handed after its `newest` epoch, and has not heard of: the reply was lost. And its slots.
local function unheard(held, newest)
  local leases, slots = {}, 0
  for _, one in ipairs(held) do
    if number(one.epoch) > number(newest) then
      local item = item_of(one.id)
      leases[#leases + 1] = {one.id, item.path, item.body, one.epoch}
      slots = slots + item.slots
    end
  end
  return leases, slots
end

-- What is set aside and this worker may take, in order; and whether some are left to others for a moment.
local function set_aside_for(worker, models, now)
  local found, left_to_others = {}, false
  for _, model in ipairs(models) do
    local left, flat = {}, redis.call("HGETALL", key("t", model))
    for i = 1, #flat, 2 do left[flat[i]] = flat[i + 1] end
    for _, id in ipairs(redis.call("LRANGE", key("a", model), 0, MAX_ASIDE - 1)) do
      local till, whose = string.match(left[id] or "", "^(%d+) (.*)$")
      local ahead = whose and number(till) > number(now) + LEFT_MS -- by a clock that was set back since
      local free = not whose or whose == worker or number(till) < number(now) or ahead
      if free and redis.call("HEXISTS", key("d", id), worker) == 0 then found[#found + 1] = id end
      left_to_others = left_to_others or not free
    end
  end
  return found, left_to_others
end

local function fairest(models)
  local served = {}
  for _, model in ipairs(models) do served[model] = redis.call("LLEN", key("a", model)) < MAX_ASIDE end
  for _, member in ipairs(redis.call("ZRANGE", key("r", ""), 0, -1)) do
    if served[child_of(member)] then return child_of(member) end
  end
end

local function next_in_order(models)
  local model = fairest(models)
  if model then return (serve("", {model}, 1)) end
end

-- The next item in order, if a full worker should have it.
local function newcomer(worker, models)
  local model = fairest(models)
  if not model then return end
  if redis.call("HEXISTS", P .. "flows", flow_of(next_path(model))) == 1 then return end
  for other, room in pairs(others_than(worker).room) do
    if other ~= worker and room > 0 and serves(other, model) then return end
  end
  return (serve("", {model}, 1))
end

-- One worker at a time looks again soon for what is left to others: whether another one does.
local function another_watches(worker, now)
  local till, who = string.match(redis.call("GET", P .. "watch") or "0 ", "^(%d+) (.*)$")
  return who ~= worker and number(till) > number(now)
end

local function watch(worker, till) redis.call("SET", P .. "watch", string.format("%d ", till) .. worker, "EX", 60) end

-- What is set aside goes first: it was next before anything that is still queued. With the leases, 1 if this worker is
-- to look again soon. `newest` is the epoch of the last lease that it has heard of.
function calls.lease(worker, newest, now, ttl, slots, yields, most, ...)
  local models, leases, left, others, more = {...}, {}, number(slots), nil, true
  local held, asks = in_hand(worker), left > 0
  now, most, yields = clock(now), number(most), number(yields)
  sign(worker, now, ttl, models)
  if most > 0 then
    local taken
    leases, taken = unheard(held, newest)
    yields = yields - math.max(0, taken - left)
    left = math.max(0, left - taken)
  end
  comes(worker, left, held)
  local aside, left_to_others = set_aside_for(worker, models, now)
  while more and left > 0 and #leases < most do
    local id, fresh, other, size = table.remove(aside, 1), false, nil, nil
    if id then
      withdraw(id)
    else
      id, fresh = next_in_order(models), true
    end
    more = id
    if more and fresh and may_leave(id, worker) then
      others = others or others_than(worker)
      other = better_for(id, worker, left, others)
    end
    if other then
      leave_to(other, id, now, others)
      left_to_others = true
    elseif more then
      leases[#leases + 1], size = take(worker, now, id)
      left = left - size
    end
  end
  while left <= 0 and yields > 0 and #leases < most do
    local id, size = newcomer(worker, models), nil
    if not id then break end
    leases[#leases + 1], size = take(worker, now, id)
    yields = yields - size
  end
  redis.call("HSET", P .. "room", worker, math.max(0, left))
  if most == 0 then return {leases, 0} end
  local watching = false
  if left_to_others and not another_watches(worker, now) then
    watching = #leases == 0
    watch(worker, watching and number(now) + LEFT_MS or 0)
    more = more or not watching -- who has work may be long in coming
  end
  for _, model in ipairs(asks and more and models or {}) do
    if redis.call("EXISTS", key("a", model), key("r", model)) > 0 then ring(model) end
  end
  return {leases, watching and 1 or 0}
end

function calls.renew(worker, now, ttl)
  if not redis.call("ZSCORE", P .. "w", worker) then return 0 end
  redis.call("ZADD", P .. "w", number(clock(now)) + number(ttl), worker)
  return 1
end

function calls.answer(id, epoch, result)
  local item = key("i", id)
  local held = redis.call("HMGET", item, "worker", "epoch", "cost", "at", "op", "path")
  if not held[1] or held[2] ~= epoch then return 0 end
  let_go(id, held[6], held[1])
  redis.call("HDEL", item, "body", "op")
  redis.call("HSET", item, "done", "1")
  redis.call("XADD", P .. "done", "*", "id", id, "result", result, "cost", held[3], "at", held[4], "op", held[5] or "")
  return 1
end

function calls.lose(id, epoch)
  local held = redis.call("HMGET", key("i", id), "worker", "epoch")
  if not held[1] or held[2] ~= epoch then return false end
  lose(id, held[1])
  return 1
end

function calls.decline(id, epoch, why)
  local item = key("i", id)
  local held = redis.call("HMGET", item, "worker", "epoch", "path")
  if not held[1] or held[2] ~= epoch then return false end
  redis.call("HSET", key("d", id), held[1], why)
  local model = split(held[3])[1]
  if not able(id, model) then return redis.call("HVALS", key("d", id)) end
  let_go(id, held[3], held[1])
  set_aside(id)
  ring(model)
  return {}
end

function calls.forget(id, receipt)
  local item = key("i", id)
  local facts = redis.call("HMGET", item, "path", "worker", "done", "attempts")
  if facts[2] then
    let_go(id, facts[1], facts[2])
  elseif facts[1] and not facts[3] then
    withdraw(id)
  end
  redis.call("DEL", item, key("d", id))
  if facts[4] then redis.call("SREM", P .. "given_up", id) end
  if receipt ~= "" then receipts[#receipts + 1] = receipt end
  return 1
end

-- An answer is settled: its flow pays the tokens that it used beyond its charge, once, however often this is called.
function calls.settle(id, receipt, path, tokens)
  if tokens ~= "0" and redis.call("EXISTS", key("i", id)) == 1 then correct(path, number(tokens)) end
  return calls.forget(id, receipt)
end

function calls.expire(now)
  local back, declined = {}, {}
  now = clock(now)
  local latest = string.format("%d", number(now) + AHEAD_MS)
  for _, worker in ipairs(redis.call("ZRANGEBYSCORE", P .. "w", "(" .. latest, "+inf")) do
    redis.call("ZADD", P .. "w", latest, worker) -- unless it is dead, it says sooner that it is there
  end
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

-- Several calls in one, each behind the number of its parts. Nobody reads what they return.
function calls.all(...)
  local parts, at = {...}, 1
  while at < #parts do
    local last = at + tonumber(parts[at])
    calls[parts[at + 1]](unpack(parts, at + 2, last))
    at = last + 1
  end
  return 1
end

redis.register_function(LIBRARY, function(keys, arguments)
  begin_tree(keys[1])
  struck, epoch, receipts = {}, nil, {}
  local answer = calls[arguments[1]](unpack(arguments, 2))
  write_nodes()
  write_the_rest()
  return answer
end)
