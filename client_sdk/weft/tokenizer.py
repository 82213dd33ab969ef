"""Tokenizers, from the server that serves the model: the same files that the base model came with, and no model hub.

Files are kept under WEFT_CACHE_DIR (else ~/.cache/weft), in a folder named by their hashes, so that a changed
tokenizer is a different folder. transformers is imported only here, and only when a tokenizer is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from weft.errors import APIResponseValidationError
from weft.transport.download import whole
from weft.transport.http import Call, Transport
from weft.wire.account.usage import CHAT_TEMPLATES, TokenizerFilesResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def fetch_tokenizer(transport: Transport, model: str) -> Path:
    """The folder with the tokenizer files of `model`, fetched if they are not all here."""
    route = f"/weft/models/{quote(model, safe='/:')}/tokenizer"
    listing = await transport.ask("GET", route, TokenizerFilesResponse)
    named = [*listing.files, *listing.templates]
    if not listing.files or any(Path(name).name != name or name.startswith(".") for name in named):
        raise APIResponseValidationError(f"{route}: not a list of plain file names: {sorted(named)}")
    files = listing.files | {f"{CHAT_TEMPLATES}/{name}": sha256 for name, sha256 in listing.templates.items()}
    folder = cache_dir() / "tokenizers" / _digest(json.dumps(files, sort_keys=True).encode())[:32]
    for name, sha256 in files.items():
        target = folder / name
        if target.exists() and _digest(target.read_bytes()) == sha256:
            continue
        content = (await transport.send(Call("GET", f"{route}/{quote(name)}"))).content
        if _digest(content) != sha256:
            raise APIResponseValidationError(f"{route}/{name}: the file is not the one that was listed")
        _write(target, content)
    return folder


def cache_dir() -> Path:
    """The folder in which files from servers are kept."""
    try:
        return Path(os.environ.get("WEFT_CACHE_DIR") or Path.home() / ".cache" / "weft")
    except RuntimeError:
        raise OSError(errno.ENOENT, "this user has no home: name a folder for tokenizers in WEFT_CACHE_DIR") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(target: Path, content: bytes) -> None:
    """Write a file of the cache, which several processes and users may share."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as file:
            file.write(content)
    except OSError as error:
        what = f"{error.strerror} (for tokenizers WEFT_CACHE_DIR names another folder)"
        raise OSError(error.errno, what, str(target)) from error


_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Silence transformers' advice to install PyTorch: a tokenizer does not need it."""
    given = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[_ADVICE]


_loading = threading.Lock()


def _forked() -> None:
    """After a fork: replace the lock, which a thread of the parent may have held and nobody in the child would
    release."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, without looking anywhere else. One thread at a time: a first import of transformers
    fails in a thread that begins it while another is importing it."""
    with _loading:
        return _load(folder)


@functools.lru_cache(maxsize=16)
def _load(folder: Path) -> PreTrainedTokenizerBase:
    with _no_advice():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError):
        # A bare tokenizer.json does not say which class it is for; the plain fast tokenizer fits any.
        if not (folder / "tokenizer.json").exists():
            raise
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
