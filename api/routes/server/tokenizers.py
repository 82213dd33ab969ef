"""The tokenizers of base models, for Weft's client and (`api.routes.server.hub`) for those of the Hugging Face hub.

Weights are never given out: only the files of a model folder that make up its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from weft.wire import TokenizerFilesResponse
from weft.wire.account.usage import CHAT_TEMPLATES

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.routes.server.weft import card_of
from api.state.service import ServiceDep

router = APIRouter(prefix="/api/v1/weft")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "config.json",
)


@router.get("/models/{name:path}/tokenizer", **declare(scope="any", limit="call"))
async def tokenizer(name: str, service: ServiceDep, who: PrincipalDep) -> TokenizerFilesResponse:
    """The tokenizer files of a base model that there are, and their SHA-256."""
    return await tokenizer_files(card_of(service, name).path)


@router.get(
    "/models/{name:path}/tokenizer/{file:path}", response_class=FileResponse, **declare(scope="any", limit="call")
)
async def tokenizer_file(name: str, file: str, service: ServiceDep, who: PrincipalDep) -> FileResponse:
    folder = card_of(service, name).path
    if file not in by_path(await tokenizer_files(folder)):
        raise NotFound(f"no tokenizer file {quote(file)} of model {quote(name)}")
    return FileResponse(folder / file)


def by_path(listed: TokenizerFilesResponse) -> dict[str, str]:
    """The SHA-256 of each file, by its path in the model's folder."""
    return listed.files | {f"{CHAT_TEMPLATES}/{name}": sha256 for name, sha256 in listed.templates.items()}


async def tokenizer_files(folder: Path) -> TokenizerFilesResponse:
    """The tokenizer files of a model and their hashes, computed beside the event loop when they are first asked for."""
    return await run_in_threadpool(_listed, folder)


@lru_cache(maxsize=64)
def _listed(folder: Path) -> TokenizerFilesResponse:
    """Remembered, since model folders do not change while they are served."""
    files, templates = (folder / name for name in TOKENIZER_FILES), (folder / CHAT_TEMPLATES).glob("*.jinja")
    return TokenizerFilesResponse(files=_hashes(files), templates=_hashes(templates))


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}
