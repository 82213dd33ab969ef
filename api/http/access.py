"""What every route says about itself: which scope it needs, how it counts against rate limits, and what it meters.

    @router.post("/optim_step", **declare(scope="train", limit="work", meters="nothing"))
    async def optim_step(who: PrincipalDep, ...): ...

`declare` makes the keyword arguments of a route. They hold a guard that runs before the route: it authenticates,
refuses (403) a key that lacks the scope and an organisation that is suspended, and counts the request (429). A test
fails for a route that declares nothing, and others are made from these declarations: every role against every route,
every route with another organisation's ids.

scope   one of `store.roles.SCOPES`, several of which one suffices, "any" for every good key, or "public" for routes
        that take none and guard themselves (a signature, a browser session).
limit   "call" counts one request; "work" counts one request, and its operation's tokens and flight are counted where
        it is accepted (`api.operations.submit`); "poll" is not counted, so that results arrive and sessions live on.
meters  what a bill will show of it: "train" (prefill if it is `forward_only`), "prefill", "sample" (with the prefill of
        its prompt), "storage" or "nothing". A test compares it with what lands in usage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Depends, Request

from api.errors import Forbidden
from api.http.auth import PrincipalDep
from api.state.rates import count_request
from store.roles import Scope

Limit = Literal["call", "work", "poll"]
Meter = Literal["train", "prefill", "sample", "storage", "nothing"]

#: Of routes that belong to training and to sampling alike, and of those that show what they make.
WORKING: tuple[Scope, ...] = ("train", "sample")
LOOKING: tuple[Scope, ...] = ("train", "sample", "checkpoints:read")


@dataclass(frozen=True)
class Access:
    scopes: tuple[str, ...]
    limit: Limit
    meters: Meter

    @property
    def public(self) -> bool:
        return self.scopes == ("public",)

    def allows(self, scopes: frozenset[str]) -> bool:
        return self.scopes == ("any",) or any(scope in scopes for scope in self.scopes)


class Guard:
    """The dependency that holds a route's declaration and enforces it."""

    def __init__(self, access: Access) -> None:
        self.access = access

    async def __call__(self, request: Request, who: PrincipalDep) -> None:
        if not self.access.allows(who.scopes):
            needed = " or ".join(self.access.scopes)
            raise Forbidden(
                f"{request.method} {request.url.path} needs the scope {needed}; this key has "
                f"{', '.join(sorted(who.scopes)) or 'none'} (role {who.role}): ask an admin of your organisation"
            )
        if self.access.limit != "poll":
            await count_request(request, who)


class Public(Guard):
    """The declaration of a route without a key."""

    async def __call__(self) -> None:  # type: ignore[override]
        pass


def declare(
    *, scope: Scope | tuple[Scope, ...] | Literal["any", "public"], limit: Limit, meters: Meter = "nothing"
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator."""
    access = Access(scope if isinstance(scope, tuple) else (scope,), limit, meters)
    return {"dependencies": [Depends(Public(access) if access.public else Guard(access))]}


def declared(route: Any) -> Access | None:
    """What a route (fastapi.routing.APIRoute) declares."""
    for depends in getattr(route, "dependencies", []):
        if isinstance(depends.dependency, Guard):
            return depends.dependency.access
    return None
