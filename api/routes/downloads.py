"""Files behind signed links (`api.who.signing`). No key is asked for: the link is the permission, and it ends."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from sqlalchemy.orm import Session

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.archives import archive_ref
from api.state.service import Service, ServiceDep
from api.who.lookup import expired, plain_id
from store import tables

router = APIRouter(prefix="/api/v1/downloads")

_FILES, _ARCHIVE = "files", "checkpoint.tar"


def file_path(checkpoint_id: str, name: str) -> str:
    """The path, to be signed, of one file of a checkpoint."""
    return f"{router.prefix}/{checkpoint_id}/{_FILES}/{name}"


def archive_path(checkpoint_id: str) -> str:
    """The path, to be signed, of a checkpoint's archive."""
    return f"{router.prefix}/{checkpoint_id}/{_ARCHIVE}"


@router.get("/{checkpoint_id}/files/{name:path}", **declare(scope="public", limit="call"))
async def file(checkpoint_id: str, name: str, request: Request, service: ServiceDep) -> FileResponse:
    row = await _checkpoint(request, service, checkpoint_id)
    folder = service.blobs.path(row.ref).resolve()
    return _serve(folder, folder / name)


@router.get("/{checkpoint_id}/checkpoint.tar", **declare(scope="public", limit="call"))
async def archive(checkpoint_id: str, request: Request, service: ServiceDep) -> FileResponse:
    row = await _checkpoint(request, service, checkpoint_id)
    folder = service.blobs.path(archive_ref(row.ref)).resolve()
    return _serve(folder, folder / _ARCHIVE)


async def _checkpoint(request: Request, service: Service, checkpoint_id: str) -> tables.Checkpoint:
    """What the link names, if it is one of ours; the signature is looked at before anything else."""
    service.signer.verify(request.scope["path"], request.query_params)

    def read(session: Session) -> tables.Checkpoint | None:
        return session.get(tables.Checkpoint, checkpoint_id) if plain_id(checkpoint_id) else None

    row = await service.read(read)
    if row is None or expired(row):
        raise NotFound("the checkpoint of this link was deleted or has expired")
    return row


def _serve(folder: Path, path: Path) -> FileResponse:
    if not path.resolve().is_relative_to(folder) or not path.is_file():
        raise NotFound(f"no file {quote(path.name)} here; ask for new links")
    return FileResponse(path, media_type="application/octet-stream")
