"""Refusals in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from api.errors import ApiError, Invalid, NotFound, count, form_of


class Refused(Invalid):
    """A parameter of OpenAI's or vLLM's API that cannot be honoured."""

    def __init__(self, detail: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(detail)
        self.param = param
        self.code = code or "invalid_request"


class NoModel(NotFound):
    code = "model_not_found"
    param = "model"


class OpenAIRoute(APIRoute):
    """A route whose refusals have OpenAI's form, whichever part of the server raises them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                # the traceback's frames hold the body, and a thread's future holds the error: a reference circle
                error.__traceback__ = None
                count(request, error)
                status = 400 if error.status == 422 else error.status
                return JSONResponse(form_of(error), status, error.headers)

        return handled
