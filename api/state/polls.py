"""Requests that are held open, because they wait for something or their client receives a large answer slowly: how many
each organisation may have, and how all of them are answered when the server stops.

Each takes a connection, and those are everybody's. An organisation may hold as many as a `SHARE`th of the connections
that nobody holds: alone a quarter of all, several each less, and however many there are, some are left for who comes
next. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from api.errors import RateLimited
from api.state.counted import counted
from store.settings import FrontSettings, SettingsError

T = TypeVar("T")

SHARE = 3
#: After how many seconds an organisation beyond its share is told to come again.
COME_AGAIN_S = 5
#: How many files of this process are no connections: the database, blobs, workers.
OTHER_FILES = 256
MOST_FILES = 65_536


class LongPolls:
    """`hold` waits on behalf of a request; `release` answers everyone who waits, now and from then on. `most`: the
    connections that the server may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: set[asyncio.Task[Any]] = set()
        self._of: Counter[str] = Counter()  # by organisation
        self._released = False

    def full(self, org_id: str) -> bool:
        """True if the organisation's polls hold its whole share of connections."""
        return SHARE * self._of[org_id] >= self._most - self._of.total()

    def check(self, org_id: str) -> None:
        """Raise RateLimited if an organisation holds its whole share."""
        if self.full(org_id):
            raise self.refusal(org_id)

    def refusal(self, org_id: str) -> RateLimited:
        return RateLimited(
            f"{self._of[org_id]} requests of this organisation wait for results, or take large ones, at this moment, "
            f"which is its share of the server's {self._most} connections: retry in {COME_AGAIN_S} s, and send fewer "
            "at a time; one retrieve_futures waits for all requests of a sampler",
            reason="held_requests",
            retry_after_s=COME_AGAIN_S,
            scope="organisation",
        )

    async def hold(self, org_id: str, waiting: Coroutine[Any, Any, T], otherwise: T) -> T:
        """The result of `waiting`, or `otherwise` if the server stops first."""
        if self._released:
            waiting.close()
            return otherwise
        task = asyncio.current_task()
        assert task is not None
        self._held.add(task)
        try:
            with self.counted(org_id):
                return await waiting
        except asyncio.CancelledError:
            if not self._released:
                raise
            task.uncancel()
            return otherwise
        finally:
            self._held.discard(task)

    def counted(self, org_id: str) -> AbstractContextManager[None]:
        """Count a request of that organisation as held open, during the block."""
        return counted(self._of, org_id)

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        self._released = True
        for task in self._held:
            task.cancel()


def most_connections(settings: FrontSettings) -> int:
    """How many connections this process may have, after raising its limit of open files as far as it may and needs.
    Raises SettingsError if that leaves none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted <= OTHER_FILES:
        raise SettingsError(
            f"a process may open {wanted} files here, and {OTHER_FILES} are for other things than connections: "
            f"ulimit -n {settings.max_connections + OTHER_FILES} (systemd: LimitNOFILE)"
        )
    return min(settings.max_connections, wanted - OTHER_FILES)
