"""The client, to be installed from the server that it talks to: `pip install https://SERVER/sdk/<wheel>`.

`/sdk/` lists it in the form that pip reads, so `pip install --find-links https://SERVER/sdk/ weft-tuning` works too.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.client_wheel import WHEEL_NAME, ClientWheel, client_wheel
from api.state.threads import Threads

router = APIRouter(prefix="/sdk")
#: The wheel is made once, however many requests ask for it first.
_making = Threads(1)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>weft-tuning</title></head>
<body><h1>weft-tuning</h1>
<p>Weft's client in this server's version: copy the link's address into <code>pip install</code>.</p>
<p><a href="/sdk/{name}#sha256={sha256}">{name}</a></p>
</body></html>
"""


@router.get("", include_in_schema=False, **declare(scope="public", limit="call"))
@router.get("/", response_class=HTMLResponse, **declare(scope="public", limit="call"))
async def listing() -> HTMLResponse:
    wheel = await _wheel()
    return HTMLResponse(_PAGE.format(name=WHEEL_NAME, sha256=wheel.sha256))


@router.get("/{name}", response_class=Response, **declare(scope="public", limit="call"))
async def wheel(name: str) -> Response:
    found = await _wheel()
    if name != WHEEL_NAME:
        raise NotFound(f"no {quote(name)} here; this server's client is {WHEEL_NAME}")
    return Response(found.content, media_type="application/octet-stream")


async def _wheel() -> ClientWheel:
    found = await _making.run("sdk", client_wheel)
    if found is None:
        raise NotFound(
            "this server has no wheel of its client, for pip did not install it; use client_sdk of its checkout"
        )
    return found
