"""Requests begin a few in each turn of the event loop, by turns of whom they are from. Those that come at the same
moment would otherwise all begin in one turn, which takes as long as all of them, and whatever else is ready waits for
its end: other organisations, and the probes that watch whether this process lives.

Whom a request is from is its organisation, where its key is one that was used in the last seconds; else its address, so
that inventing keys gains nothing. What has begun is not paced: it goes on as its threads and its results come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.auth import carried_key
from api.state.addresses import holder
from store.people.secret import digest

#: Requests that begin in one turn of the event loop; each takes a millisecond or two until it waits for something.
EACH_TURN = 8
#: Never wait: they ask nothing.
PROBES = frozenset({"/health", "/healthz", "/api/v1/healthz"})

#: The organisation of a key that is known, by the key's SHA-256.
KnownOrg = Callable[[str], str | None]


class Pace:
    """`app`, whose requests begin by turns. Lives in the event loop."""

    def __init__(self, app: ASGIApp, known: KnownOrg) -> None:
        self._app, self._known = app, known
        self._begun = 0  # in this turn
        #: Who waits, the first in front; and of each their requests, in order.
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            if self._begun >= EACH_TURN or self._lanes:
                await self._turn(_from(scope, self._known))
            else:
                self._begin()
        await self._app(scope, receive, send)

    def _begin(self) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        self._begun += 1

    async def _turn(self, lane: str) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(lane, deque()).append(waiting)
        await waiting

    def _next(self) -> None:
        """Another turn of the loop: one of each lane, again and again, until it has enough."""
        self._begun = 0
        while self._lanes and self._begun < EACH_TURN:
            lane = next(iter(self._lanes))
            line = self._lanes.pop(lane)
            waiting = line.popleft()
            if line:
                self._lanes[lane] = line  # behind the others
            if not waiting.done():  # or it was given up
                waiting.set_result(None)
                self._begin()


def _from(scope: Scope, known: KnownOrg) -> str:
    org_id = known(digest(carried_key(scope)))
    return org_id or holder(str((scope.get("client") or ("",))[0]))
