"""Room for the large bodies that are in hand, in two stages, each bounded in bytes.

While a body is received, it counts against its organisation alone: the client decides how long that takes, and a slow
one must not hold up others. Once it has been received, it is worked on (unpacked, checked, stored). That takes several
times its size in memory, and counts against the whole server.

A body without room waits in a queue (`Line`), first come first served, and after a while its client is told to come
again. Finding out what is wrong with a large body costs everybody, since the interpreter does nothing else meanwhile.
So an organisation whose body was refused has to rest: its next bodies wait several times as long as that one took.
Lives in the event loop. Guards of routes that take data hold the room for as long as the request lasts
(`api.http.access`). Large results that are read for an answer take room in the same way, apart from bodies, until their
client has received them. Here, too, the client decides how long that takes; so all results together are bounded by a
`Pool`, in which organisations that hold much leave room for others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from api.errors import ApiError, RateLimited
from api.state.threads import in_line

#: Bodies up to this size need no room.
SMALL_BYTES = 65_536
#: How many bodies of the largest size are worked on at the same time.
AT_A_TIME = 2
#: As many bytes of results as this many of the largest size may be held in all.
RESULTS_IN_HAND = 8
WAIT_S = 10.0
#: A wait longer than that of any client.
FOR_LONG_S = 86_400.0
#: How long an organisation rests, as a multiple of the time that it took to refuse its body; and the longest rest.
REST_TIMES = 9
MOST_REST_S = 5.0
#: Bodies being received, or results being sent.
What = Literal["bodies", "results"]
_REMEDIES = {
    "bodies": "send fewer at the same moment, or smaller",
    "results": "fetch fewer at the same moment, and read each to its end",
}
#: Statuses of refusals that only reading the body could find.
_WRONG = frozenset({400, 404, 413, 422})


class Pool:
    """The bytes that the queues (`Line`) of all organisations hold together. A queue gets bytes only if it then holds
    no more than the pool has left: so each finds room for half of what the others leave, and a few cannot take it
    all."""

    def __init__(self, most_bytes: int) -> None:
        self.most = self._free = most_bytes
        self._lines: dict[Line, None] = {}  # queues that hold bytes or wait, oldest first

    def take(self, line: Line, held_bytes: int, size_bytes: int) -> bool:
        """Take `size_bytes` for a queue that holds `held_bytes`. False if there is no room."""
        self._lines.setdefault(line)
        fits = held_bytes + size_bytes <= self._free - size_bytes
        self._free -= size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        """Give bytes back, and admit those who wait for them."""
        self._free += size_bytes
        self._lines = {line: None for line in self._lines if not line.empty}
        for line in list(self._lines):
            line.admit()


class Line:
    """A queue for a number of bytes that may be held at a time: they are given out in order of arrival."""

    def __init__(
        self, scope: str, most_bytes: int, wait_s: float, what: What = "bodies", pool: Pool | None = None
    ) -> None:
        self._scope, self._what, self._pool = scope, what, pool
        self._most = most_bytes
        self._wait_s = wait_s
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.rests_until = 0.0

    @property
    def empty(self) -> bool:
        return not self._held and not self._waiting

    def rest(self, seconds: float) -> None:
        """Admit nobody for a while; a further rest adds to it, up to MOST_REST_S."""
        now = asyncio.get_running_loop().time()
        self.rests_until = min(max(self.rests_until, now) + seconds, now + MOST_REST_S)

    async def enter(self, size_bytes: int) -> None:
        """Wait for room. Raises RateLimited after a while."""
        place = (size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self.admit()
        try:
            await asyncio.wait_for(asyncio.shield(place[1]), self._wait_s)
        except BaseException as error:
            if place[1].done():  # admitted at the same moment
                self.leave(size_bytes)
            else:
                self._waiting.remove(place)
                self.admit()
            if isinstance(error, TimeoutError):
                raise self._refusal(size_bytes) from None
            raise

    def leave(self, size_bytes: int) -> None:
        self._held -= size_bytes
        if self._pool is not None:
            self._pool.give_back(size_bytes)
        self.admit()

    def admit(self) -> None:
        """Admit the first body of the queue as soon as it fits. Others wait behind it: smaller bodies would otherwise
        keep a large one out for ever."""
        loop = asyncio.get_running_loop()
        if self._waiting and loop.time() < self.rests_until:
            loop.call_at(self.rests_until, self.admit)
            return
        while self._waiting and self._held + self._waiting[0][0] <= self._most:
            if self._pool is not None and not self._pool.take(self, self._held, self._waiting[0][0]):
                return
            size_bytes, admitted = self._waiting.popleft()
            self._held += size_bytes
            admitted.set_result(None)

    def _refusal(self, size_bytes: int) -> RateLimited:
        scope, most = self._scope, self._most
        if self._pool is not None and self._held + size_bytes <= most:  # the pool has no room
            scope, most = "server", self._pool.most
        return RateLimited(
            f"no room for {size_bytes} bytes within {self._wait_s:g} s: the large {self._what} that this {scope} "
            f"has in hand at a time may be {most} bytes; {_REMEDIES[self._what]}",
            reason=f"large_{self._what}",
            retry_after_s=1,
            scope=scope,
        )


@dataclass
class RequestRoom:
    """The room of one request."""

    server: Line
    size_bytes: int
    #: When work on the body began.
    began_s: float | None = None
    #: Whether the body was refused. The exception need not tell: what is wrong with data is told through the future.
    refused: bool = False

    async def work(self) -> None:
        """The body has been received and is worked on from now. Raises RateLimited."""
        if self.began_s is None and self.size_bytes > SMALL_BYTES:
            await self.server.enter(self.size_bytes)
            self.began_s = time.monotonic()


class LargeBodies:
    def __init__(
        self, max_body_bytes: int, wait_s: float = WAIT_S, what: What = "bodies", pool: Pool | None = None
    ) -> None:
        self._most, self._what, self._pool = max_body_bytes, what, pool
        self._wait_s = wait_s
        self._server = Line("server", AT_A_TIME * max_body_bytes, wait_s)
        self._orgs: dict[str, Line] = {}

    @asynccontextmanager
    async def room(self, org_id: str, size_bytes: int) -> AsyncIterator[RequestRoom]:
        """Hold room, within the block, for a body of up to `size_bytes`. Raises RateLimited."""
        size_bytes = min(size_bytes, self._most)
        room = RequestRoom(self._server, size_bytes)
        if size_bytes <= SMALL_BYTES:
            yield room
            return
        line = self._orgs.setdefault(org_id, Line("organisation", self._most, self._wait_s, self._what, self._pool))
        with in_line(org_id):
            await line.enter(size_bytes)
        try:
            yield room
        except ApiError as error:
            room.refused = room.refused or error.status in _WRONG
            raise
        finally:
            if room.began_s is not None:
                self._server.leave(size_bytes)
                if room.refused:
                    line.rest(REST_TIMES * (time.monotonic() - room.began_s))
            line.leave(size_bytes)
            self._forget(org_id)

    def _forget(self, org_id: str) -> None:
        """Drop the queue of an organisation that neither holds nor waits for anything."""
        line = self._orgs.get(org_id)
        if line is None or not line.empty:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < line.rests_until:
            loop.call_at(line.rests_until, self._forget, org_id)
        else:
            del self._orgs[org_id]
