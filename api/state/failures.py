"""What is counted where it fails, and beyond a number refused before it costs anything more. In memory of each process,
in buckets as those of `api.state.rates`.

Tries to get in, by address: of keys, links, invitations and sign-ins by a provider. Who guesses has nothing to gain (a
secret is 256 random bits); this bounds what the guessing costs us and the provider.

Polls for what is not there, by key. Polls are not counted against rate limits, so that results arrive; but who asks for
ids that nobody has makes the database look for each, which no client does of itself.
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

#: Of one address (`addresses.holder`) in a minute.
TRIES_PER_MINUTE = 60
#: Of one key in a minute.
MISSES_PER_MINUTE = 600


class Failures(Generic[Who]):
    """Lives in the event loop."""

    def __init__(self, charge: Callable[[Who], Charge], words: str, clock: Clock) -> None:
        self._charge, self._words, self._buckets = charge, words, Buckets(clock)

    def check(self, who: Who) -> None:
        """Raises RateLimited for whoever has failed too often."""
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
    """To get in."""

    def of(request: Request) -> Charge:
        address = request.client.host if request.client is not None else ""
        return Charge("address", holder(address), "sign_ins", TRIES_PER_MINUTE, 1)

    words = "more than {most} tries to sign in from this address failed in a minute: retry in {wait_s} s"
    return Failures(of, words, clock)


def misses(clock: Clock = time.monotonic) -> Failures[Principal]:
    """Of polls."""

    def of(who: Principal) -> Charge:
        return Charge("key", who.urn, "unknown_ids", MISSES_PER_MINUTE, 1)

    words = (
        "more than {most} polls of this key in a minute were for ids that are not there: retry in {wait_s} s, with ids "
        "that this server has given out"
    )
    return Failures(of, words, clock)
