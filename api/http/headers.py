"""Headers of requests and answers, for the routes of every operation: less general, and so faster, than Starlette's."""

from __future__ import annotations

from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: A larger answer is written in pieces of this many bytes.
PIECE_BYTES = 65_536


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this `name`, which is in small letters."""
    for known, value in scope["headers"]:
        if known == name:
            found: str = value.decode("latin-1")
            return found
    return None


class Ready(Response):
    """An answer of bytes whose content type has no charset; not for 204 and 304, which have no body."""

    def __init__(self, body: bytes, media_type: str, status_code: int = 200) -> None:
        self.status_code, self.media_type, self.background, self.body = status_code, media_type, None, body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode())]


class Large(Ready):
    """An answer that its client may take slowly: each piece is written once the earlier ones have been taken (apart
    from buffers). So a client is late if it takes no piece for long, however much there is to take. What is `held` for
    the answer is held until the client has all of it, or has left."""

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
