"""Fetching files by signed URLs, without credentials, into a folder."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import httpx

from weft.errors import APIConnectionError, APIResponseValidationError, APIStatusError
from weft.transport.http import error_of
from weft.transport.retry import passes_by_itself

TOGETHER = 4
TRIES = 4

#: Chooses files: from the names of all files to those to keep, each with its name in the folder.
Rename = Callable[[list[str]], Mapping[str, str]]


async def download_files(urls: Mapping[str, str], folder: Path) -> None:
    """Fetch every URL to its relative path below `folder`. A file is there whole or not at all."""
    for name in urls:
        if not _inside(name):
            raise APIResponseValidationError(f"the server names a file outside of the folder: {name!r}")
    slots = asyncio.Semaphore(TOGETHER)
    timeout = httpx.Timeout(60.0, connect=5.0)
    async with httpx.AsyncClient(follow_redirects=True, timeout=timeout) as http:

        async def fetch(name: str, url: str) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            async with slots:
                await _fetch(http, url, target)

        await asyncio.gather(*(fetch(name, url) for name, url in sorted(urls.items())))


async def download_archive(url: str, folder: Path, rename: Rename) -> None:
    """Fetch a tar and unpack those of its files that `rename` names into `folder`; nothing of it can land outside."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download.") as scratch:
        archive = Path(scratch) / "archive.tar"
        async with httpx.AsyncClient(follow_redirects=True, timeout=httpx.Timeout(60.0, connect=5.0)) as http:
            await _fetch(http, url, archive)
        await asyncio.to_thread(_unpack, archive, folder, rename)


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _unpack(archive: Path, folder: Path, rename: Rename) -> None:
    """Unpack plain files only, and only their contents, as tarfile's filter "data" would: Python 3.11.2 (Debian 12)
    lacks that filter. Files are unpacked beside the archive and moved once all are there, so a full disk leaves
    `folder` as it was."""
    unpacked: dict[Path, Path] = {}
    try:
        with tarfile.open(archive) as tar:
            files = {member.name: member for member in tar.getmembers() if member.isfile()}
            chosen = rename(list(files))
            for old, new in chosen.items():
                if not _inside(new):
                    raise tarfile.TarError(f"{new!r} lies outside of the folder")
                source = tar.extractfile(files[old])
                assert source is not None  # of a file there is one
                part = unpacked[folder / new] = archive.parent / f"part-{len(unpacked)}"
                with source, part.open("wb") as target:
                    shutil.copyfileobj(source, target)
    except tarfile.TarError as error:
        raise APIResponseValidationError(f"the archive cannot be unpacked: {error}") from error
    for whole, part in unpacked.items():
        whole.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, whole)


async def _fetch(http: httpx.AsyncClient, url: str, target: Path) -> None:
    """Download one file. Temporary errors and broken connections are tried again from the start; a refusal, or an error
    of the local disk, is final."""
    for attempt in range(TRIES):
        try:
            await _stream(http, url, target)
            return
        except APIStatusError as error:
            if attempt == TRIES - 1 or not passes_by_itself(error.status_code):
                raise
        except (httpx.RequestError, ConnectionError) as error:
            if attempt == TRIES - 1:
                raise APIConnectionError(f"download of {target.name}: {error or type(error).__name__}") from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from error
        await asyncio.sleep(0.5 * 2**attempt)


async def _stream(http: httpx.AsyncClient, url: str, target: Path) -> None:
    with whole(target) as file:
        async with http.stream("GET", url) as response:
            if not response.is_success:
                await response.aread()
                raise error_of(response)
            async for piece in response.aiter_bytes():
                file.write(piece)


@contextmanager
def whole(target: Path) -> Iterator[BinaryIO]:
    """Write a file that appears at `target` only when it is whole, whoever else writes there; everybody may read it.
    Raises OSError if a device, a pipe or a folder is at `target`: the file would replace it."""
    if target.exists() and not target.is_file():
        raise OSError(errno.EEXIST, "there is something else than a file, which stays", str(target))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
