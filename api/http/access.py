"""What every route says about itself: which scope it needs, how it counts against rate limits, and what it meters.

    @router.post("/optim_step", **declare(scope="train", limit="work", meters="nothing"))
    async def optim_step(who: PrincipalDep, ...): ...

`declare` makes the keyword arguments of a route. They hold a guard that runs before the route: it authenticates,
refuses (403) a key that lacks the scope and an organisation that is suspended, and counts the request (429). A test
fails for a route that declares nothing, and others are made from these declarations: every role against every route,
every route with another organisation's ids.

scope   one of `store.people.roles.SCOPES`, several of which one suffices, "any" for every good key, or "public" for
        routes that take none and guard themselves (a signature, a browser session).
limit   "call" counts one request; "work" counts one request, and its operation's tokens and flight are counted where
        it is accepted (`api.operations.submit`); "poll" is not counted, so that results arrive and sessions live on,
        unless what it asks for is not there (`api.state.failures`); "background" is counted by itself.
body    how large the request's body may be (`api.http.body_sizes`). Routes that take "data" hold room for it among the
        large bodies (`api.state.large_bodies`) until they have answered.
meters  what a bill will show of it: "train" (prefill if it is `forward_only`), "prefill", "sample" (with the prefill of
        its prompt), "storage" or "nothing". A test compares it with what lands in usage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Depends, Request

from api.errors import POLLS, Forbidden
from api.http.auth import PrincipalDep, principal
from api.http.bodies import may_come_to
from api.http.body_sizes import GUARD_KEY, ROOM_KEY, SCOPE_KEY, SizeClass
from api.state.rates import count_background, count_request
from api.state.service import service_of
from api.who.principal import Principal
from store.people.roles import Scope

Limit = Literal["call", "work", "poll", "background"]
Meter = Literal["train", "prefill", "sample", "storage", "nothing"]

#: Scopes of routes that both training and sampling need, and of routes that show what they make.
WORKING: tuple[Scope, ...] = ("train", "sample")
LOOKING: tuple[Scope, ...] = ("train", "sample", "checkpoints:read")


@dataclass(frozen=True)
class Access:
    scopes: tuple[str, ...]
    limit: Limit
    meters: Meter
    body: SizeClass = "small"

    @property
    def public(self) -> bool:
        return self.scopes == ("public",)

    def allows(self, scopes: frozenset[str]) -> bool:
        return self.scopes == ("any",) or not scopes.isdisjoint(self.scopes)


class Guard:
    """The dependency that holds a route's declaration and enforces it."""

    def __init__(self, access: Access) -> None:
        self.access = access

    async def __call__(self, request: Request, who: PrincipalDep) -> None:
        await self.check(request, who)

    async def check(self, request: Request, who: Principal) -> None:
        request.scope[SCOPE_KEY], request.scope[GUARD_KEY] = self.access.body, self
        self._allow(request, who)
        if self.access.limit == "poll":
            service_of(request).misses.check(who)
            request.scope[POLLS] = who
        elif self.access.limit == "background":
            await count_background(request, who)
        else:
            await count_request(request, who)

    async def look_again(self, request: Request) -> None:
        """Check the credential again: a request let in long ago may have lost its key, or the key its rights, since."""
        self._allow(request, await principal(request))

    def _allow(self, request: Request, who: Principal) -> None:
        if not self.access.allows(who.scopes):
            needed = " or ".join(self.access.scopes)
            raise Forbidden(
                f"{request.method} {request.scope['path']} needs the scope {needed}; this key has "
                f"{', '.join(sorted(who.scopes)) or 'none'} (role {who.role}): ask an admin of your organisation"
            )


class DataGuard(Guard):
    """The guard of a route that takes data: it holds room for the body until the route has answered."""

    async def __call__(self, request: Request, who: PrincipalDep) -> AsyncIterator[None]:  # type: ignore[override]
        await self.check(request, who)
        async with service_of(request).large_bodies.room(who.org_id, may_come_to(request)) as room:
            request.scope[ROOM_KEY] = room
            yield


class Public(Guard):
    """The declaration of a route without a key."""

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        request.scope[SCOPE_KEY] = self.access.body


def declare(
    *,
    scope: Scope | tuple[Scope, ...] | Literal["any", "public"],
    limit: Limit,
    meters: Meter = "nothing",
    body: SizeClass = "small",
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator."""
    access = Access(scope if isinstance(scope, tuple) else (scope,), limit, meters, body)
    guard = Public if access.public else DataGuard if body == "data" else Guard
    return {"dependencies": [Depends(guard(access))]}


def declared(route: Any) -> Access | None:
    """The declaration of a route (fastapi.routing.APIRoute)."""
    for depends in getattr(route, "dependencies", []):
        if isinstance(depends.dependency, Guard):
            return depends.dependency.access
    return None
