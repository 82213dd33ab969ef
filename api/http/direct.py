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

from api.errors import LastResort
from api.http.access import DataGuard, Guard
from api.http.auth import principal
from api.who.principal import Principal

#: How an application answers an exception, by its type.
Handlers = Mapping[Any, Callable[..., Any]]
#: Finds something that a route asks for.
_Find = Callable[[Request, Principal], Awaitable[Any]]


class Direct:
    """`app`, with `routes` before it: POSTs to fixed paths, with the guard of a key. `handlers` answer for what they
    raise."""

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
        self._finds = _finds_of(route.endpoint)
        self._room: Callable[[Request, Principal], AbstractAsyncContextManager[None]] | None = None
        if isinstance(guard, DataGuard):
            self._room = asynccontextmanager(guard.__call__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._route
        request = Request(scope, receive, send)
        try:
            who = await principal(request)
            if self._room is not None:
                async with self._room(request, who):  # until it has answered
                    await (await self._answer(request, who))(scope, receive, send)
                return
            await self._guard.check(request, who)
            response = await self._answer(request, who)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:
                raise
            error.__traceback__ = None  # its frames have the body, and the future of a thread the error: a circle
            response = await handler(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, who: Principal) -> Response:
        found = {name: await find(request, who) for name, find in self._finds.items()}
        answer = await self._route.endpoint(**found)
        if isinstance(answer, Response):
            return answer
        content = answer.model_dump_json(exclude_none=self._route.response_model_exclude_none)
        return Response(content, media_type="application/json")


def _finds_of(endpoint: Callable[..., Any]) -> dict[str, _Find]:
    """What a route asks for: the request, who it is from, and what its dependencies find in the request alone."""
    hints = get_type_hints(endpoint, include_extras=True)
    return {name: _find_of(hint) for name, hint in hints.items() if name != "return"}


def _find_of(hint: Any) -> _Find:
    if hint is Request:
        return _itself
    (depends,) = hint.__metadata__
    dependency = depends.dependency
    return _asker if dependency is principal else lambda request, _who: dependency(request)


async def _itself(request: Request, _who: Principal) -> Request:
    return request


async def _asker(_request: Request, who: Principal) -> Principal:
    return who
