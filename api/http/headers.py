"""Headers of requests and answers that come with every operation, without what Starlette does for those of any kind."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope


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
