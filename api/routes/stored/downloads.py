"""Files behind signed links (`api.who.signing`). No key is asked for: the link is the permission, and it ends,
at the latest with the key that asked for it."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse, Response
from sqlalchemy import select
from starlette.types import Receive, Scope, Send

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.archives import archive_ref
from api.http.auth import LinkHolderDep
from api.state.service import Service, ServiceDep
from api.who.lookup import expired, visible
from api.who.principal import Principal
from store import tables

router = APIRouter(prefix="/api/v1/downloads")

_FILES, _ARCHIVE = "files", "checkpoint.tar"
#: How long a link of the object store is valid, which checks no permission: long enough to begin a download.
STORE_LINKS_LAST = timedelta(minutes=2)
#: Headers that keep browsers from taking a tenant's files for scripts or pages of this origin.
AS_IT_IS = {"x-content-type-options": "nosniff"}

#: What the published description says of both.
_DOWNLOAD: dict[str, Any] = {
    "response_class": FileResponse,
    "responses": {302: {"description": "The file is in the object store, at the Location"}},
}


def file_path(checkpoint_id: str, name: str) -> str:
    """The path, to be signed, of one file of a checkpoint."""
    return f"{router.prefix}/{checkpoint_id}/{_FILES}/{name}"


def archive_path(checkpoint_id: str) -> str:
    """The path, to be signed, of a checkpoint's archive."""
    return f"{router.prefix}/{checkpoint_id}/{_ARCHIVE}"


@router.get("/{checkpoint_id}/files/{name:path}", **_DOWNLOAD, **declare(scope="public", limit="call"))
async def file(checkpoint_id: str, name: str, service: ServiceDep, who: LinkHolderDep) -> Response:
    row = await _checkpoint(service, who, checkpoint_id)
    return await service.threads.run(row.org_id, partial(_serve, service, row.ref, name))


@router.get("/{checkpoint_id}/checkpoint.tar", **_DOWNLOAD, **declare(scope="public", limit="call"))
async def archive(checkpoint_id: str, service: ServiceDep, who: LinkHolderDep) -> Response:
    row = await _checkpoint(service, who, checkpoint_id)
    return await service.threads.run(row.org_id, partial(_serve, service, archive_ref(row.ref), _ARCHIVE))


async def _checkpoint(service: Service, who: Principal, checkpoint_id: str) -> tables.Checkpoint:
    """The checkpoint of the link, if it still exists for the organisation that the link was made for."""
    named = select(tables.Checkpoint).where(tables.Checkpoint.id == checkpoint_id, visible(who, tables.Checkpoint))
    row = await service.read(lambda session: session.scalars(named).one_or_none())
    if row is None or expired(row):
        raise NotFound("the checkpoint of this link was deleted or has expired")
    return row


def _serve(service: Service, ref: str, name: str) -> Response:
    """The file, or a redirect to the object store. Damage was checked when the link was made."""
    held = ExitStack()
    try:
        if link := service.blobs.link(ref, name, STORE_LINKS_LAST):
            return RedirectResponse(link, 302, {"Cache-Control": "no-store"})
        where = service.blobs.at(ref)
        folder = (where if isinstance(where, Path) else held.enter_context(where.reading())).resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise FileNotFoundError(name)
        return _Held(held.pop_all(), path, media_type="application/octet-stream", headers=AS_IT_IS)
    except FileNotFoundError:
        raise NotFound(f"no file {quote(name)} here; ask for new links") from None
    finally:
        held.close()


class _Held(FileResponse):
    """An open file that is not deleted or moved until it is sent."""

    def __init__(self, held: ExitStack, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)
