"""Refusals in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from api.errors import ApiError, Invalid, NotFound, count, form_of


class Refused(Invalid):
    """A parameter that cannot be honoured."""

    def __init__(self, detail: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(detail)
        self.param = param
        self.code = code or "invalid_request"


class NoModel(NotFound):
    code = "model_not_found"
    param = "model"


class OpenAIRoute(APIRoute):
    """A route whose refusals, by whatever part of the server, have OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                error.__traceback__ = None  # its frames have the body, and the future of a thread the error: a circle
                count(request, error)
                status = 400 if error.status == 422 else error.status
                return JSONResponse(form_of(error), status, error.headers)

        return handled
