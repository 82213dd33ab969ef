"""Failures are counted, and beyond a number further tries are refused before they cost anything. The counts are in the
memory of each process, in buckets like those of `api.state.rates`.

Attempts to get in (keys, links, invitations, sign-ins by a provider) are counted by address. Guessing is hopeless (a
secret is 256 random bits); the limit bounds what it costs us and the provider.

Polls for unknown ids are counted by key. Polls do not count against rate limits, so that results arrive; but each
unknown id costs a look into the database, and no well-behaved client asks for one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi import Request

from api.errors import RateLimited
from api.state.addresses import holder
from api.state.rates import Buckets, Charge
from api.who.principal import Principal

Who = TypeVar("Who")
Clock = Callable[[], float]

#: Failed attempts of one address (`addresses.holder`) in a minute.
TRIES_PER_MINUTE = 60
#: Polls of one key in a minute that found nothing.
MISSES_PER_MINUTE = 600


class Failures(Generic[Who]):
    """Lives in the event loop."""

    def __init__(self, charge: Callable[[Who], Charge], words: str, clock: Clock) -> None:
        self._charge, self._words, self._buckets = charge, words, Buckets(clock)

    def check(self, who: Who) -> None:
        """Raise RateLimited if `who` has failed too often."""
        if self._buckets.empty:
            return
        charge = self._charge(who)
        wait_s = math.ceil(self._buckets.wait_s(charge))
        if wait_s > 0:
            words = self._words.format(most=charge.limit, wait_s=wait_s)
            raise RateLimited(words, reason=charge.what, retry_after_s=wait_s, scope=charge.scope)

    def note(self, who: Who) -> None:
        """`who` has failed."""
        self._buckets.count(self._charge(who))


def attempts(clock: Clock = time.monotonic) -> Failures[Request]:
    """Counts attempts to get in."""

    def of(request: Request) -> Charge:
        address = request.client.host if request.client is not None else ""
        return Charge("address", holder(address), "sign_ins", TRIES_PER_MINUTE, 1)

    words = "more than {most} tries to sign in from this address failed in a minute: retry in {wait_s} s"
    return Failures(of, words, clock)


def misses(clock: Clock = time.monotonic) -> Failures[Principal]:
    """Counts polls that found nothing."""

    def of(who: Principal) -> Charge:
        return Charge("key", who.urn, "unknown_ids", MISSES_PER_MINUTE, 1)

    words = (
        "more than {most} polls of this key in a minute were for ids that are not there: retry in {wait_s} s, with ids "
        "that this server has given out"
    )
    return Failures(of, words, clock)
