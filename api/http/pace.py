"""Only a few requests begin in each turn of the event loop, taken from their senders in rotation. Requests that arrive
at the same moment would otherwise all begin in one turn. That turn takes as long as all of them together, and
everything else waits for its end: other organisations, and the probes that check whether this process lives.

The sender of a request is its organisation, if its key was used in the last seconds; else its address, so that
inventing keys gains nothing. Probes have a rotation of their own, by address alone: they wait for no other requests,
and a sender of many probes holds up only its own. A request that has begun is not paced any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.auth import carried_key
from api.state.addresses import holder
from store.people.secret import digest

#: How many requests, and how many probes, begin in one turn of the event loop; each takes a millisecond or two until it
#: first waits.
EACH_TURN = 8
#: Paths of probes, which need no database and no worker.
PROBES = frozenset({"/health", "/healthz", "/api/v1/healthz"})

#: The organisation of a key that is known, by the key's SHA-256.
KnownOrg = Callable[[str], str | None]


class Pace:
    """Wraps `app`: its requests begin in rotation. Lives in the event loop."""

    def __init__(self, app: ASGIApp, known: KnownOrg) -> None:
        self._app, self._known = app, known
        self._requests, self._probes = Turns(), Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            probes = scope["path"] in PROBES
            turns = self._probes if probes else self._requests
            if not turns.begins():
                await turns.later(_address(scope) if probes else _from(scope, self._known))
        await self._app(scope, receive, send)


class Turns:
    """Lets a few requests begin in each turn of the event loop, one of each sender in rotation."""

    def __init__(self, each_turn: int = EACH_TURN) -> None:
        self._each_turn = each_turn
        self._begun = 0  # how many have begun in this turn
        #: By sender, the next one first: its waiting requests, in order.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def begins(self) -> bool:
        """Whether one more request may begin in this turn."""
        if self._waiting or self._begun >= self._each_turn:
            return False
        self._begin()
        return True

    def later(self, sender: str) -> asyncio.Future[None]:
        """Done in a later turn, when the next request of this sender may begin."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(turn)
        return turn

    def _begin(self) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        self._begun += 1

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._each_turn:
            sender = next(iter(self._waiting))
            requests = self._waiting.pop(sender)
            first = requests.popleft()
            if requests:
                self._waiting[sender] = requests  # the sender goes to the end of the rotation
            if not first.done():  # unless the request was cancelled
                first.set_result(None)
                self._begin()


def _from(scope: Scope, known: KnownOrg) -> str:
    return known(digest(carried_key(scope))) or _address(scope)


def _address(scope: Scope) -> str:
    return holder(str((scope.get("client") or ("",))[0]))
