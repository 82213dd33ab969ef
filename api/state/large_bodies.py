"""Room for the large bodies that are in hand: being received, unpacked, checked and stored.

Each takes several times its size in memory, so their bytes are bounded, for one organisation and for all. Whoever
finds no room waits in line, first come first served; an organisation that has its share is passed by, so it never holds
up another. Who waits too long is told to come again.

Lives in the event loop. Guards of routes that take data hold room for as long as the request lasts (`api.http.access`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from api.errors import RateLimited

#: Bodies that are not larger need no room.
SMALL_BYTES = 65_536
#: How many bodies of the largest size are in hand at the same time.
AT_A_TIME = 2
WAIT_S = 10.0


@dataclass(eq=False)
class _Waiter:
    org_id: str
    size_bytes: int
    admitted: asyncio.Future[None]


class LargeBodies:
    def __init__(self, max_body_bytes: int, wait_s: float = WAIT_S) -> None:
        self._per_org = max_body_bytes
        self._total = AT_A_TIME * max_body_bytes
        self._wait_s = wait_s
        self._held: Counter[str] = Counter()
        self._line: list[_Waiter] = []

    @asynccontextmanager
    async def room(self, org_id: str, size_bytes: int) -> AsyncIterator[None]:
        """Hold room for a body that may come to `size_bytes`. Raises RateLimited after a while without any."""
        if size_bytes <= SMALL_BYTES:
            yield
            return
        size_bytes = min(size_bytes, self._per_org)
        await self._enter(_Waiter(org_id, size_bytes, asyncio.get_running_loop().create_future()))
        try:
            yield
        finally:
            self._leave(org_id, size_bytes)

    async def _enter(self, waiter: _Waiter) -> None:
        self._line.append(waiter)
        self._admit()
        try:
            await asyncio.wait_for(asyncio.shield(waiter.admitted), self._wait_s)
        except BaseException as error:
            if waiter.admitted.done():  # at the same moment
                self._leave(waiter.org_id, waiter.size_bytes)
            else:
                self._line.remove(waiter)
                self._admit()
            if isinstance(error, TimeoutError):
                raise self._refusal(waiter) from None
            raise

    def _leave(self, org_id: str, size_bytes: int) -> None:
        self._held[org_id] -= size_bytes
        if not self._held[org_id]:
            del self._held[org_id]
        self._admit()

    def _admit(self) -> None:
        """Let in, in order, whoever has room. The first who lacks the server's room keeps it from those behind, or many
        smaller bodies would keep a large one out for ever."""
        full: set[str] = set()
        for waiter in list(self._line):
            if waiter.org_id in full:
                continue
            if self._held[waiter.org_id] + waiter.size_bytes > self._per_org:
                full.add(waiter.org_id)
                continue
            if self._held.total() + waiter.size_bytes > self._total:
                return
            self._held[waiter.org_id] += waiter.size_bytes
            self._line.remove(waiter)
            waiter.admitted.set_result(None)

    def _refusal(self, waiter: _Waiter) -> RateLimited:
        own = self._held[waiter.org_id] + waiter.size_bytes > self._per_org
        scope, most = ("organisation", self._per_org) if own else ("server", self._total)
        return RateLimited(
            f"no room for a body of up to {waiter.size_bytes} bytes within {self._wait_s:g} s: the large bodies that "
            f"this {scope} has in hand at a time may be {most} bytes; send fewer at the same moment, or smaller ones",
            reason="large_bodies",
            retry_after_s=1,
            scope=scope,
        )
