"""The JSON answers for everything that is refused or fails, wherever that happens in the application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import OperationalError, TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import (
    ApiError,
    Invalid,
    Malformed,
    NoMethod,
    NotFound,
    NotHere,
    Unavailable,
    away,
    body_of,
    count,
    explain,
    form_of,
)
from store import logs
from store.people.organisations import NoSuch, PeopleError

log = logging.getLogger("weft.api")

#: Longer paths are not compared with the existing ones.
LONGEST_PATH = 128
#: How long the answer is held when a store is away or nobody expected the failure: the official client asks for a
#: result again as soon as it has a 500 or 503, hundreds of times a second.
HELD_S = 1.0


def anywhere(error: ApiError) -> Response:
    """A refusal that can come from any path; it is in OpenAI's form, too, since OpenAI's clients read no other."""
    body = body_of(error.detail, error.code, error.request_id) | form_of(error)
    return JSONResponse(body, error.status, error.headers)


def not_here(request: Request) -> NotHere:
    """The refusal of an unknown path, with a guess at the path that was meant."""
    path = request.scope["path"]
    paths = [route.path for route in request.app.routes if request.method in (getattr(route, "methods", None) or ())]
    advice = _meant(path, paths) if len(path) <= LONGEST_PATH else None
    return NotHere(f"this server has no {request.method} {path}; {advice or '/docs lists what there is'}")


def _meant(path: str, paths: Sequence[str]) -> str | None:
    behind = max((known for known in paths if known != "/" and path.endswith(known)), key=len, default=path)
    if behind != path:
        more = path.removesuffix(behind)
        return f"leave {more} out at the end of the server's address (base_url, WEFT_BASE_URL, TINKER_BASE_URL)"
    near = get_close_matches(path, paths, 1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def install(app: FastAPI, astray: Callable[[Request, str], Response | None]) -> None:
    """Register a JSON answer for every kind of failure. `astray` may give a page for an unknown path instead."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        count(request, error)
        return error.response()

    @app.exception_handler(PeopleError)
    async def people_error(_request: Request, error: PeopleError) -> Response:
        return (NotFound if isinstance(error, NoSuch) else Invalid)(str(error)).response()

    @app.exception_handler(OperationalError)
    @app.exception_handler(PoolTimeout)
    @app.exception_handler(OSError)
    async def store_error(_request: Request, error: Exception) -> Response:
        refusal = away(error)
        await asyncio.sleep(HELD_S)
        response = anywhere(refusal)
        response.headers["connection"] = "close"  # perhaps this replica alone has lost its way there: ask any
        return response

    @app.exception_handler(RequestValidationError)
    async def bad_parameters(_request: Request, error: RequestValidationError) -> Response:
        return Malformed(explain(error, prefix=("query", "path"))).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            refused = not_here(request)
            return astray(request, refused.detail) or anywhere(refused)
        if error.status_code == 405:
            told = f"{request.scope['path']} does not take {request.method}; send {(error.headers or {}).get('Allow')}"
            return anywhere(NoMethod(told, headers=error.headers))
        return JSONResponse(body_of(str(error.detail), "http_error"), error.status_code, error.headers)

    app.add_middleware(LastResort)


class LastResort:
    """Answers 500 for whatever nobody expected, with an id that leads to the logged traceback and nothing inside; and
    503 for what the end of the server cuts off."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # by uvicorn alone, of what is not answered when it stops
            if started:
                raise
            await anywhere(Unavailable("the server stops: send the same request again"))(scope, receive, send)
        except Exception:
            error_id = logs.about().get("request", "")
            route = getattr(scope.get("route"), "path", "no route")  # the template, since a path may contain a secret
            log.exception("error %s in %s %s", error_id, scope["method"], route)
            if started:
                raise  # part of the answer is sent: only closing the connection tells the client
            await asyncio.sleep(HELD_S)
            why = f"internal error {error_id}: the operator finds it in the server's log under this id"
            await anywhere(ApiError(why, request_id=error_id))(scope, receive, send)
