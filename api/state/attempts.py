"""Failed tries to get in, by address: of keys, links, invitations and sign-ins by a provider. Who guesses has nothing
to gain (a secret is 256 random bits); this bounds what the guessing costs us and the provider.

In memory of each process, in buckets as those of `api.state.rates`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from fastapi import Request

from api.errors import RateLimited
from api.state.rates import Buckets, Charge

#: Of one address in a minute.
MOST_PER_MINUTE = 60


class Attempts:
    """Lives in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(clock)

    def check(self, request: Request) -> None:
        """Raises RateLimited for an address that has failed too often."""
        wait = self._buckets.wait_s(_failure(request))
        if wait > 0:
            raise RateLimited(
                f"more than {MOST_PER_MINUTE} tries to sign in from this address failed in a minute: retry in "
                f"{math.ceil(wait)} s",
                reason="sign_ins",
                retry_after_s=math.ceil(wait),
                scope="address",
            )

    def note(self, request: Request) -> None:
        """One has failed."""
        self._buckets.count(_failure(request))


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _failure(request: Request) -> Charge:
    return Charge("address", _address(request), "sign_ins", MOST_PER_MINUTE, 1)
