"""The buckets of `api.state.rates` in Redis, for all replicas together: one script for all of a request's charges. The
clock is that of Redis. While Redis is away nothing new is accepted anyway, so requests are let through and answered
there."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool

from api.state.rates import PERIOD_S, Charge, Refusal
from scheduler.links.contract import QueueUnreachable
from scheduler.links.redis_clients import pooled
from scheduler.links.redis_queue import reaching

#: KEYS are the buckets; ARGV[1] is the period in microseconds, followed by a limit and a cost for each bucket. The
#: value of a bucket is the time at which it will be full. Returns the index of the charge that must wait longest, and
#: for how many microseconds.
_TAKE = """
local time = redis.call("TIME")
local now, period = time[1] * 1000000 + time[2], tonumber(ARGV[1])
local worst, longest, full = 0, 0, {}
for i, bucket in ipairs(KEYS) do
  local limit, cost = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local at = math.max(tonumber(redis.call("GET", bucket) or "0"), now)
  local wait = at + math.min(cost, limit) * period / limit - period - now
  if wait > longest then worst, longest = i, wait end
  full[i] = at + cost * period / limit
end
if worst > 0 then return {worst, math.ceil(longest)} end
for i, bucket in ipairs(KEYS) do
  redis.call("SET", bucket, string.format("%.0f", full[i]), "PX", math.ceil((full[i] - now) / 1000) + 1)
end
return {0, 0}
"""


class SharedRates:
    def __init__(self, url: str, name: str = "rates") -> None:
        self._redis = pooled(url)
        self._prefix = f"{{weft:{name}}}:"
        self._script = self._redis.register_script(_TAKE)

    async def take(self, charges: Sequence[Charge]) -> Refusal | None:
        return await run_in_threadpool(self._take, charges) if charges else None

    def close(self) -> None:
        self._redis.close()

    def _take(self, charges: Sequence[Charge]) -> Refusal | None:
        arguments = [int(PERIOD_S * 1e6)]
        for charge in charges:
            arguments += [charge.limit, charge.cost]
        try:
            with reaching():
                place, wait_us = self._script(
                    keys=[f"{self._prefix}{charge.name}" for charge in charges], args=arguments
                )
        except QueueUnreachable:
            return None
        return Refusal(charges[place - 1], wait_us / 1e6) if place else None
