"""Room for the large bodies that are in hand, in two stages, each bounded in bytes.

While a body is received, it counts against its organisation alone: how long that takes is up to the client, and a
slow one must not hold up others. Once it is there, it is worked on (unpacked, checked, stored), which takes several
times its size in memory, and counts against all; that takes as long as the server takes.

Who finds no room waits in line, first come first served, and is told to come again after a while. To find out what is
wrong with a large body costs everybody: the interpreter does nothing else. So an organisation whose body was refused
rests: its next ones wait several times as long as that one took. Lives in the event loop. Guards of routes that take
data hold the room for as long as the request lasts (`api.http.access`). Large results that are read for an answer are
held in the same way, apart from bodies, until their client has them. How long that takes is up to the client, too; so
all of them together are bounded by a `Pool`, in which those that hold much leave room to others.
"""

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

#: Bodies that are not larger need no room.
SMALL_BYTES = 65_536
#: How many bodies of the largest size are worked on at the same time.
AT_A_TIME = 2
#: So many results of the largest size are in hand in all.
RESULTS_IN_HAND = 8
WAIT_S = 10.0
#: Longer than any client waits.
FOR_LONG_S = 86_400.0
#: An organisation rests this many times as long as it took to refuse its body, and at most so long.
REST_TIMES = 9
MOST_REST_S = 5.0
#: Bodies that come, and results that go.
What = Literal["bodies", "results"]
_REMEDIES = {
    "bodies": "send fewer at the same moment, or smaller",
    "results": "fetch fewer at the same moment, and read each to its end",
}
#: The refusals that only reading the body could find.
_WRONG = frozenset({400, 404, 413, 422})


class Pool:
    """What the lines of all organisations hold together. None is let in to hold more than it leaves free: so each finds
    room for half of what the others leave, and no few of them can take it all."""

    def __init__(self, most_bytes: int) -> None:
        self.most = self._free = most_bytes
        self._lines: dict[Line, None] = {}  # that hold something, or wait, the first in front

    def take(self, line: Line, held_bytes: int, size_bytes: int) -> bool:
        """So much more for `line`, if there is room."""
        self._lines.setdefault(line)
        fits = held_bytes + size_bytes <= self._free - size_bytes
        self._free -= size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        """Whoever waits for it is let in."""
        self._free += size_bytes
        self._lines = {line: None for line in self._lines if not line.empty}
        for line in list(self._lines):
            line.admit()


class Line:
    """So many bytes at a time, in order of arrival."""

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
        """Let nobody in for a while; a rest that was begun grows by it, within MOST_REST_S."""
        now = asyncio.get_running_loop().time()
        self.rests_until = min(max(self.rests_until, now) + seconds, now + MOST_REST_S)

    async def enter(self, size_bytes: int) -> None:
        """Raises RateLimited after a while without room."""
        place = (size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self.admit()
        try:
            await asyncio.wait_for(asyncio.shield(place[1]), self._wait_s)
        except BaseException as error:
            if place[1].done():  # at the same moment
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
        """The first keeps its place until there is room, or smaller bodies would keep a large one out for ever."""
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
        if self._pool is not None and self._held + size_bytes <= most:  # by what others hold
            scope, most = "server", self._pool.most
        return RateLimited(
            f"no room for {size_bytes} bytes within {self._wait_s:g} s: the large {self._what} that this {scope} "
            f"has in hand at a time may be {most} bytes; {_REMEDIES[self._what]}",
            reason=f"large_{self._what}",
            retry_after_s=1,
            scope=scope,
        )


@dataclass
class Room:
    """What one request holds."""

    server: Line
    size_bytes: int
    #: When work on the body began.
    began_s: float | None = None
    #: The body was refused, which the exception need not tell: what is wrong with data is told through the future.
    refused: bool = False

    async def work(self) -> None:
        """The body is there. Raises RateLimited."""
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
    async def room(self, org_id: str, size_bytes: int) -> AsyncIterator[Room]:
        """Hold room for a body that may come to `size_bytes`. Raises RateLimited."""
        size_bytes = min(size_bytes, self._most)
        room = Room(self._server, size_bytes)
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
        """Drop the line of an organisation that has nothing to do with it any more."""
        line = self._orgs.get(org_id)
        if line is None or not line.empty:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < line.rests_until:
            loop.call_at(line.rests_until, self._forget, org_id)
        else:
            del self._orgs[org_id]
