"""Rate limits: requests and tokens per minute, and operations in flight, of a key, its project and its organisation.

Each rate is a bucket of one minute's worth that fills steadily (GCRA: the only state is the time at which it will be
full again). What is larger than a whole bucket is let through when the bucket is full, and paid back by waiting
longer afterwards: so nothing is refused for ever, and the rate holds over time. A request is counted in all its buckets
or in none.

Beyond a limit is 429 with the time to wait, which clients obey; that the machines are full is never an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastapi import Request

from api.errors import RateLimited

if TYPE_CHECKING:
    from api.who.principal import Principal, RateLimit
    from scheduler.journal.accepting.in_flight import InFlight
    from scheduler.order.operations import NewOperation

PERIOD_S = 60.0
#: Telemetry, which clients send by themselves: of one key, apart from its other requests.
BACKGROUND_PER_MINUTE = 600
#: Searches in the console, which are sent letter by letter.
SEARCHES_PER_MINUTE = 240
#: Points of curves that an organisation may log, to protect the database's writer.
POINTS_PER_MINUTE = 120_000
#: How many buckets are kept in memory; full ones are forgotten first.
MAX_BUCKETS = 100_000


@dataclass(frozen=True)
class Charge:
    """`cost` units (`what` names them) to take from the bucket of `scope` `id`, which holds `limit` and refills once a
    minute."""

    scope: str
    id: str
    what: str
    limit: int
    cost: int

    @property
    def name(self) -> str:
        return f"{self.scope}:{self.id}:{self.what}"


@dataclass(frozen=True)
class Refusal:
    charge: Charge
    retry_after_s: float


class Rates(Protocol):
    """Holds the buckets, in this process or shared by several."""

    async def take(self, charges: Sequence[Charge]) -> Refusal | None:
        """Take all `charges`; or none, and return the one that must wait longest."""


class Buckets:
    """Buckets in the memory of this process. Lives in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}

    @property
    def empty(self) -> bool:
        """True if no bucket has been used."""
        return not self._full_at

    def wait_s(self, charge: Charge) -> float:
        """How long until there is room for `charge`; 0 or less if there is."""
        now = self._clock()
        return wait_s(self._full_at.get(charge.name, now), now, charge)

    def count(self, charge: Charge) -> None:
        now = self._clock()
        if len(self._full_at) >= MAX_BUCKETS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        full = max(self._full_at.get(charge.name, now), now)
        self._full_at[charge.name] = full + charge.cost * PERIOD_S / charge.limit


class LocalRates:
    """Buckets of this process alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(clock)

    async def take(self, charges: Sequence[Charge]) -> Refusal | None:
        waits = [(self._buckets.wait_s(charge), charge) for charge in charges]
        longest, charge = max(waits, key=lambda wait: wait[0], default=(0.0, None))
        if longest > 0 and charge is not None:
            return Refusal(charge, longest)
        for charge in charges:
            self._buckets.count(charge)
        return None


def wait_s(full: float, now: float, charge: Charge) -> float:
    """How long until a bucket that will be full at `full` holds the cost of `charge`; 0 or less if it does."""
    needed_s = min(charge.cost, charge.limit) * PERIOD_S / charge.limit
    return max(full, now) + needed_s - PERIOD_S - now


async def count_request(request: Request, who: Principal) -> None:
    """Raises RateLimited."""
    rates: Rates = request.app.state.service.rates
    await _take(rates, [_charge(limit, "requests_per_minute", 1) for limit in who.limits])


async def count_background(request: Request, who: Principal) -> None:
    """Raises RateLimited."""
    rates: Rates = request.app.state.service.rates
    await _take(rates, [Charge("key", who.urn, "background_per_minute", BACKGROUND_PER_MINUTE, 1)])


async def count_searches(request: Request, who: Principal) -> None:
    """Raises RateLimited."""
    rates: Rates = request.app.state.service.rates
    await _take(rates, [Charge("key", f"{who.org_id} {who.urn}", "searches_per_minute", SEARCHES_PER_MINUTE, 1)])


async def count_points(rates: Rates, who: Principal, points: int) -> None:
    """Raises RateLimited."""
    await _take(rates, [Charge("organisation", who.org_id, "points_per_minute", POINTS_PER_MINUTE, points)])


async def count_tokens(rates: Rates, limits: Iterable[RateLimit], tokens: int) -> None:
    """Raises RateLimited."""
    if tokens:
        await _take(rates, [_charge(limit, "tokens_per_minute", tokens) for limit in limits])


async def check_in_flight(limits: Iterable[RateLimit], in_flight: InFlight, new: NewOperation) -> None:
    """Raise RateLimited if `new` may not be accepted beside what is in flight."""
    held = [one for one in limits if one.max_in_flight is not None and not in_flight.has(one.scope, one.id, new)]
    found = [await in_flight.elsewhere(limit.scope, limit.id, new) for limit in held]
    for limit, elsewhere in zip(held, found, strict=True):
        open_now = max(elsewhere.count, in_flight.count(limit.scope, limit.id))
        if not elsewhere.has and limit.max_in_flight is not None and open_now >= limit.max_in_flight:
            raise RateLimited(
                f"{open_now} samples and runs of this {limit.scope} are in flight; its limit max_in_flight is "
                f"{limit.max_in_flight}: wait for results before you send more",
                reason="max_in_flight",
                retry_after_s=1,
                scope=limit.scope,
            )


def _charge(limit: RateLimit, what: str, cost: int) -> Charge | None:
    per_minute: int | None = getattr(limit, what)
    return Charge(limit.scope, limit.id, what, per_minute, cost) if per_minute is not None else None


async def _take(rates: Rates, charges: Iterable[Charge | None]) -> None:
    counted = [charge for charge in charges if charge is not None]
    refusal = await rates.take(counted) if counted else None
    if refusal is not None:
        over, seconds = refusal.charge, math.ceil(refusal.retry_after_s)
        raise RateLimited(
            f"this {over.scope} has reached its limit {over.what} of {over.limit} (this request is {over.cost}): "
            f"retry in {seconds} s, or ask an admin to raise the limit",
            reason=over.what,
            retry_after_s=seconds,
            scope=over.scope,
        )
