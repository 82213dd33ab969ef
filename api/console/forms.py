"""Forms are carried out by the API's own routes: the fields of a form become the JSON body that a client would send, so
that every rule is in one place."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from starlette.types import Message


def as_json(request: Request, **fields: Any) -> Request:
    """The request with `fields` as its JSON body; fields that are None or "" are left out. After the body it reports a
    disconnect."""
    body = orjson.dumps({name: value for name, value in fields.items() if value not in (None, "")})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    bodies = [body]

    async def receive() -> Message:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await request.receive()

    return Request({**request.scope, "headers": headers}, receive)
