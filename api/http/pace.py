"""Requests begin a few in each turn of the event loop, by turns of whom they are from. Those that come at the same
moment would otherwise all begin in one turn, which takes as long as all of them, and whatever else is ready waits for
its end: other organisations, and the probes that watch whether this process lives.

Whom a request is from is its organisation, where its key is one that was used in the last seconds; else its address, so
that inventing keys gains nothing. Probes have turns of their own, by address alone: they wait for no other requests,
and who sends many holds up their own. What has begun is not paced: it goes on as its threads and its results come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.auth import carried_key
from api.state.addresses import holder
from store.people.secret import digest

#: Requests that begin in one turn of the event loop, and so many probes; each takes a millisecond or two until it waits
#: for something.
EACH_TURN = 8
#: They ask nothing.
PROBES = frozenset({"/health", "/healthz", "/api/v1/healthz"})

#: The organisation of a key that is known, by the key's SHA-256.
KnownOrg = Callable[[str], str | None]


class Pace:
    """`app`, whose requests begin by turns. Lives in the event loop."""

    def __init__(self, app: ASGIApp, known: KnownOrg) -> None:
        self._app, self._known = app, known
        self._requests, self._probes = Turns(), Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            probes = scope["path"] in PROBES
            turns = self._probes if probes else self._requests
            if not turns.begins():
                await turns.come(_address(scope) if probes else _from(scope, self._known))
        await self._app(scope, receive, send)


class Turns:
    """A few in each turn of the event loop, one of each lane, again and again."""

    def __init__(self, each_turn: int = EACH_TURN) -> None:
        self._each_turn = each_turn
        self._begun = 0  # in this turn
        #: Who waits, the first in front; and of each their requests, in order.
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}

    def begins(self) -> bool:
        """Whether one more begins in this turn."""
        if self._lanes or self._begun >= self._each_turn:
            return False
        self._begin()
        return True

    def come(self, lane: str) -> asyncio.Future[None]:
        """Done when a later one begins."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(lane, deque()).append(waiting)
        return waiting

    def _begin(self) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        self._begun += 1

    def _next(self) -> None:
        self._begun = 0
        while self._lanes and self._begun < self._each_turn:
            lane = next(iter(self._lanes))
            line = self._lanes.pop(lane)
            waiting = line.popleft()
            if line:
                self._lanes[lane] = line  # behind the others
            if not waiting.done():  # or it was given up
                waiting.set_result(None)
                self._begin()


def _from(scope: Scope, known: KnownOrg) -> str:
    return known(digest(carried_key(scope))) or _address(scope)


def _address(scope: Scope) -> str:
    return holder(str((scope.get("client") or ("",))[0]))
