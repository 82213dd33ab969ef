"""Headers of requests and answers that come with every operation, without what Starlette does for those of any kind."""

from __future__ import annotations

from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: A larger answer is written in pieces of so many bytes.
PIECE_BYTES = 65_536


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this `name`, which is in small letters."""
    for known, value in scope["headers"]:
        if known == name:
            found: str = value.decode("latin-1")
            return found
    return None


class Ready(Response):
    """An answer of bytes of a type without a charset; 204 and 304, which have no body, are not for it."""

    def __init__(self, body: bytes, media_type: str, status_code: int = 200) -> None:
        self.status_code, self.media_type, self.background, self.body = status_code, media_type, None, body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode())]


class Large(Ready):
    """One that its client may take slowly: a piece is written when those before it have been taken, but for what lies
    in buffers. So a client is late who takes no piece for long, and not who has much to take; and what is `held` for
    the answer is held until its client has it, or has left."""

    def __init__(self, body: bytes, media_type: str, held: AsyncExitStack) -> None:
        super().__init__(body, media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), PIECE_BYTES):
                piece = self.body[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
