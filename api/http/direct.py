"""The routes that come with every operation, called without what FastAPI does for routes of any kind.

FastAPI looks for the route among all, then gathers what its signature asks for through a tree of dependencies: that is
half of what a poll costs whose result is there. The path of these routes is fixed, and what they ask for is known, so a
request goes to them at once: who it is from, the guard that the route declares, the route, its answer.
They are declared as all others are, with FastAPI; it still answers for other methods, and describes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.access import DataGuard, Guard
from api.http.auth import PrincipalDep, principal
from api.http.headers import Ready
from api.http.refusing import LastResort
from api.state.service import ServiceDep, service_of
from api.who.principal import Principal

#: How an application answers an exception, by its type.
Handlers = Mapping[Any, Callable[..., Any]]
#: How to get an argument of a route: known at once, or found by a dependency.
_Know = Callable[[Request, Principal], Any]
_Find = Callable[[Request], Awaitable[Any]]


class Direct:
    """Serves `routes` (POSTs to fixed paths, with a guard for keys) without FastAPI, and everything else by `app`.
    `handlers` answer the exceptions that the routes raise."""

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute], handlers: Handlers) -> None:
        self._app = app
        self._routes = {route.path: LastResort(_Call(route, handlers)) for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (direct or self._app)(scope, receive, send)


class _Call:
    """One route as an application."""

    def __init__(self, route: APIRoute, handlers: Handlers) -> None:
        guard = route.dependencies[0].dependency
        if route.methods != {"POST"} or "{" in route.path or not isinstance(guard, Guard):
            raise TypeError(f"{route.path} cannot be called directly: it is no POST to a fixed path with a key")
        self._route, self._guard, self._handlers = route, guard, handlers
        self._known, self._finds = _finds_of(route.endpoint)
        self._room: Callable[[Request, Principal], AbstractAsyncContextManager[None]] | None = None
        if isinstance(guard, DataGuard):
            self._room = asynccontextmanager(guard.__call__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._route
        request = Request(scope, receive, send)
        try:
            who = await principal(request)
            if self._room is not None:
                async with self._room(request, who):  # held until it has answered
                    await (await self._answer(request, who))(scope, receive, send)
                return
            await self._guard.check(request, who)
            response = await self._answer(request, who)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:
                raise
            # the traceback's frames hold the body, and a thread's future holds the error: a reference circle
            error.__traceback__ = None
            response = await handler(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, who: Principal) -> Response:
        found = {name: know(request, who) for name, know in self._known.items()}
        for name, find in self._finds.items():
            found[name] = await find(request)
        answer = await self._route.endpoint(**found)
        if isinstance(answer, Response):
            return answer
        content = answer.model_dump_json(exclude_none=self._route.response_model_exclude_none)
        return Ready(content.encode(), "application/json")


def _finds_of(endpoint: Callable[..., Any]) -> tuple[dict[str, _Know], dict[str, _Find]]:
    """The arguments of a route: those known when it is called (request, principal, service), and those that its
    dependencies find in the request."""
    known, finds = dict[str, _Know](), dict[str, _Find]()
    for name, hint in get_type_hints(endpoint, include_extras=True).items():
        if hint is Request:
            known[name] = lambda request, _who: request
        elif hint == PrincipalDep:
            known[name] = lambda _request, who: who
        elif hint == ServiceDep:
            known[name] = lambda request, _who: service_of(request)
        elif name != "return":
            (depends,) = hint.__metadata__
            finds[name] = depends.dependency
    return known, finds
