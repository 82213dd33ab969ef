"""The tokenizers of base models as the Hugging Face hub gives them, for programs that look for them there: Tinker's own
SDK, transformers, `hf download`. With HF_ENDPOINT=https://SERVER/hub, and an API key as HF_TOKEN, they ask this server.

Of the hub's protocol, what `huggingface_hub` needs to find a model, list its files and load them. A model has one
revision, `main`, named by the hash of its files. Nothing is looked up on the hub itself.

Source: https://huggingface.co/docs/hub/api, and the requests of huggingface_hub 2.4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse, JSONResponse

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.routes.server.tokenizers import by_path, tokenizer_files
from api.routes.server.weft import card_of
from api.state.service import ServiceDep

router = APIRouter(prefix="/hub")

MAIN = "main"

#: Where Tinker's SDK looks for the tokenizer of every Llama 3.
LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


@dataclass(frozen=True)
class Repository:
    """What the hub would hold of a model. `files`: SHA-256 by path."""

    name: str
    folder: Path
    files: dict[str, str]

    @property
    def sha(self) -> str:
        """40 hex digits, as the hub's revisions have."""
        return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()[:40]

    def missing(self, what: str, code: str) -> NotFound:
        return NotFound(f"no {what} of the tokenizer of model {quote(self.name)}", headers={"x-error-code": code})


def names_of(model: str) -> tuple[str, ...]:
    """The names by which a base model's tokenizer is asked for. Tinker's SDK leaves out what follows a ":", as in
    `org/model:peft:262144`; where it knows no tokenizer_id, also the variant of `org/model/variant`."""
    plain = model.partition(":")[0]
    return model, plain, LLAMA_3 if plain.startswith("meta-llama/Llama-3") else "/".join(plain.split("/")[:2])


async def repository(name: str, service: ServiceDep, who: PrincipalDep) -> Repository:
    served = name if name in service.cards else next((m for m in service.cards if name in names_of(m)), name)
    try:
        folder = card_of(service, served).path
    except NotFound as error:
        raise NotFound(error.detail, headers={"x-error-code": "RepoNotFound"}) from None
    return Repository(name, folder, by_path(await tokenizer_files(folder)))


RepositoryDep = Annotated[Repository, Depends(repository)]


async def at_revision(found: RepositoryDep, revision: str) -> Repository:
    if revision not in (MAIN, found.sha):
        raise found.missing(f"revision {quote(revision)}, only {MAIN},", "RevisionNotFound")
    return found


RevisionDep = Annotated[Repository, Depends(at_revision)]


@router.get("/api/models/{name:path}/tree/{revision}", **declare(scope="any", limit="call"))
async def tree(found: RevisionDep, recursive: bool = False) -> JSONResponse:
    """The tokenizer files of a base model; `recursive`: and those in folders."""
    return await folder_tree(found, "", recursive)


@router.get("/api/models/{name:path}/tree/{revision}/{folder:path}", **declare(scope="any", limit="call"))
async def folder_tree(found: RevisionDep, folder: str, recursive: bool = False) -> JSONResponse:
    """The tokenizer files of a base model in a folder; `recursive`: and in those within it."""
    inside = {file: sha256 for file, sha256 in found.files.items() if folder in ("", file.rpartition("/")[0])}
    if not inside:
        raise found.missing(f"folder {quote(folder)}", "EntryNotFound")
    shown = {file: sha256 for file, sha256 in inside.items() if recursive or file.rpartition("/")[0] == folder}
    sizes = {file: (found.folder / file).stat().st_size for file in shown}
    return JSONResponse(
        [{"type": "file", "path": file, "size": sizes[file], "oid": sha256} for file, sha256 in shown.items()]
    )


@router.get("/api/models/{name:path}/revision/{revision}", **declare(scope="any", limit="call"))
async def model_at_revision(found: RevisionDep) -> JSONResponse:
    """A base model, of which the hub's clients get the tokenizer here."""
    files = [{"rfilename": file} for file in found.files]
    return JSONResponse({"id": found.name, "sha": found.sha, "private": True, "siblings": files})


@router.get("/api/models/{name:path}", **declare(scope="any", limit="call"))  # after the paths that it would match
async def model(found: RepositoryDep) -> JSONResponse:
    """As above, of the only revision."""
    return await model_at_revision(found)


@router.head(
    "/{name:path}/resolve/{revision}/{file:path}", response_class=FileResponse, **declare(scope="any", limit="call")
)
@router.get(
    "/{name:path}/resolve/{revision}/{file:path}", response_class=FileResponse, **declare(scope="any", limit="call")
)
async def file(found: RevisionDep, file: str) -> FileResponse:
    """A tokenizer file of a base model."""
    if file not in found.files:
        raise found.missing(f"file {quote(file)}", "EntryNotFound")
    headers = {"x-repo-commit": found.sha, "etag": f'"{found.files[file]}"'}
    return FileResponse(found.folder / file, headers=headers)
