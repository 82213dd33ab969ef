"""Connections within limits: how many there are, in all and of one address, and how long a client may take to send a
request, or to read the answer.

Uvicorn waits for ever for the rest of a request, and so would hold a connection for everybody who sends half of one.
Here a sweep, once a second, closes late connections: those whose headers are not complete after `header_timeout_s`,
whose body arrives slower than over a slow line, or whose client reads an answer slower than that, or not at all.
Waiting for a result (a long poll) is not late.

A connection beyond the limits is answered, before anything of it is read, and closed. When all connections are taken,
the one that has been idle longest is closed for a new one, since nobody needs a key to hold one.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from api.http.pace import Turns
from api.server.transports import left
from api.state.addresses import holder
from api.state.polls import most_connections
from store.settings import FrontSettings

log = logging.getLogger(__name__)

#: A body may take `body_timeout_s`, plus one second for this many bytes received. An answer may wait just as long, in
#: all, for its client to read on.
BODY_BYTES_PER_S = 64 * 1024
#: How many reads are parsed in one turn of the event loop. One may hold MAX_PIPELINED requests, which take 0.3 ms.
READS_EACH_TURN = 32


class Limited(Protocol):
    """A connection, as far as a gate looks at it (`api.server.connections.Connection`)."""

    transport: Any
    flow: Any
    address: str
    timeout_keep_alive: int
    headers_since: float | None
    body_since: float | None
    unread_since: float | None
    idle_since: float | None
    body_bytes: int
    unread_s: float

    @property
    def written_bytes(self) -> int: ...
    @property
    def unread(self) -> bool: ...


class Gate:
    """Counts connections, refuses those beyond the limits, and finds late ones."""

    def __init__(self, settings: FrontSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in settings.trusted_proxies]
        self._most = most_connections(settings)
        self.clock = clock
        self._open: Counter[str] = Counter()
        self._silent: dict[Limited, None] = {}  # idle connections, the longest idle first
        self._swept = clock()
        self.reads = Turns(READS_EACH_TURN)
        self.refused: Counter[int] = Counter()  # refused connections, by status

    @property
    def count(self) -> int:
        """The number of open connections."""
        return self._open.total()

    def enter(self, address: str) -> tuple[int, str] | None:
        """Count a connection. Returns the status and text to refuse it with, if it is beyond a limit."""
        whose = self.whose(address)
        self._open[whose] += 1
        if self._open.total() > self._most and not self._make_room():
            return 503, f"the server has its most of {self._most} connections open: come again in a moment"
        most = self._settings.max_connections_per_address
        if self._open[whose] > most and not self._is_proxy(address):
            return 429, f"your address has its most of {most} connections open: use those, or fewer at the same moment"
        return None

    def leave(self, address: str) -> None:
        whose = self.whose(address)
        self._open[whose] -= 1
        if self._open[whose] <= 0:
            del self._open[whose]

    def waits(self, connection: Limited) -> None:
        """The connection waits for a request from now on."""
        self.asked(connection)
        self._silent[connection] = None

    def asked(self, connection: Limited) -> None:
        self._silent.pop(connection, None)

    def _make_room(self) -> bool:
        for connection in self._silent:
            self.asked(connection)
            connection.transport.close()  # after the rest of its last answer is sent
            return True
        return False

    def late(self, connection: Limited, now: float) -> str | None:
        """What the client of the connection is late with (headers, a body, reading an answer); None if it is not
        late."""
        settings = self._settings
        if connection.headers_since is not None and now - connection.headers_since > settings.header_timeout_s:
            return "headers"
        if connection.body_since is not None:
            allowed = settings.body_timeout_s + connection.body_bytes / BODY_BYTES_PER_S
            if now - connection.body_since > allowed:
                return "body"
        unread_s = 0.0 if connection.unread_since is None else now - connection.unread_since
        allowed = settings.body_timeout_s + connection.written_bytes / BODY_BYTES_PER_S
        if unread_s > settings.body_timeout_s or connection.unread_s + unread_s > allowed:
            return "answer to be read"
        return None

    def sweep(self, connections: Iterable[Limited]) -> None:
        """Close late connections, and those whose client has left. While the server itself pauses reading, a body is
        not late."""
        now = self.clock()
        since_last, self._swept = now - self._swept, now
        found = list(connections)
        for transport in left(each.transport for each in found if each.unread):
            transport.abort()
        for connection in found:
            if connection.idle_since is not None and now - connection.idle_since > connection.timeout_keep_alive:
                connection.transport.close()
                continue
            if connection.body_since is not None and connection.flow.read_paused:
                connection.body_since += since_last
            if (what := self.late(connection, now)) is not None:
                log.info("closed a connection of %s: waited too long for its %s", connection.address, what)
                connection.transport.abort()

    def whose(self, address: str) -> str:
        """The name that the address is counted under: a proxy's own address, not its network."""
        return address if self._is_proxy(address) else holder(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._trusted)
