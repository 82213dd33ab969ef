"""What is too large for SQL: bodies of operations, results, adapters, checkpoints. The contract of where they are kept,
which is a folder (`folder.py`) or a bucket (`objects.py`); `opening.py` opens the one that is set.

A ref is a relative name such as `ops/3f2a/body`; it names a file or a folder, and it can never leave the root.
A blob at its ref is always whole: it is the old one, or the new one, or there is none.

Damage is detected on reading. A file ends with the SHA-256 of the bytes before it, which `get` checks and strips; a
folder holds a list of its files with their SHA-256, which `reading` checks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

#: No segment starts with a dot, which excludes "..", "." and the folder of unfinished writes.
_REF = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*", re.ASCII)
#: A file ends with this and the SHA-256 of the bytes before it.
_MARK = b"sha256:\n"
SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
#: In each folder: the SHA-256 of its files, as JSON {name: hex}.
SUMS_FILE = ".sha256.json"


class BadRef(ValueError):
    """The name is not a ref."""


class Damaged(OSError):
    """A blob exists but is not what was written: truncated, overwritten or exchanged."""


class StoreAway(OSError):
    """The object store does not answer, or not with what it has; trying again may help. The message is for people."""


def is_lasting(error: BaseException) -> bool:
    """Whether trying again cannot help. Other errors of a disk may pass: it is full, over a quota, not mounted, or
    unreachable."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | Damaged) or not isinstance(
        error, OSError
    )


class FarFolder(Protocol):
    """A folder that is not on this machine."""

    def reading(self) -> AbstractContextManager[Path]:
        """`Blobs.reading` of it."""


#: A folder of weights, on this machine or elsewhere: to be read within `reading`.
Weights = Path | FarFolder


class Blobs(Protocol):
    """Any number of processes and threads may share one place. Every method raises BadRef for what is no ref, and an
    OSError when the place does not answer (`is_lasting` tells it from a blob that is not there)."""

    #: A folder of this machine, for what is on its way.
    root: Path
    #: Where calls are made from an event loop (`beside_the_loop`); None: they are short enough to be made in it.
    threads: Executor | None

    def put(self, ref: str, data: bytes) -> None:
        """Write the whole blob, replacing what was there; readers see the old bytes or the new, never a part. An
        OSError leaves nothing behind."""

    def get(self, ref: str, sha256: str = "") -> bytes:
        """The bytes of a file blob; with `sha256` (hex), they must have that digest. FileNotFoundError when there is
        none; Damaged when two reads differ from what was put: network file systems may read short once."""

    def exists(self, ref: str) -> bool: ...

    def touch(self, ref: str) -> None:
        """Count its age (`listed`) from now. FileNotFoundError when there is none."""

    def delete(self, ref: str) -> None:
        """Delete a file blob, if it is there."""

    def delete_tree(self, ref: str) -> None:
        """Delete a folder blob with all in it, a file blob, or all blobs below `ref`; nothing happens when there is
        none. Nobody sees it half deleted."""

    def size_bytes(self, ref: str) -> int:
        """Bytes of a file, or of all files in a folder; FileNotFoundError when there is none."""

    def new_folder(self, ref: str) -> AbstractContextManager[Path]:
        """An empty folder to fill; when the block succeeds it becomes `ref`, in place of an older blob."""

    def at(self, ref: str) -> Weights:
        """The folder `ref`, which need not exist: for `reading` it later."""

    def reading(self, ref: str) -> AbstractContextManager[Path]:
        """The files of a folder, on this machine and checked, for as long as the block. FileNotFoundError when there
        is none; Damaged unless it is as it was written."""

    def check_folder(self, ref: str) -> None:
        """Raise FileNotFoundError unless the folder is there, and Damaged unless it is as it was written, as far as
        can be told without carrying it here."""

    def files(self, ref: str) -> list[str]:
        """The names of the files in a folder blob, sorted."""

    def listed(self, pattern: str) -> dict[str, float]:
        """What lies at the refs of a pattern such as `ops/*/*`, with when it was written, in seconds since 1970."""

    def link(self, ref: str, name: str, lasts: timedelta) -> str:
        """A URL of one file of a folder that is good for so long without a key; "" where there are none."""

    def clear_unfinished(self, before: float | None = None) -> None:
        """Delete leftovers of writers that died, of before then. None: all of them, at start-up, while nothing else
        writes here."""


async def beside_the_loop(blobs: Blobs, work: Callable[..., T], *arguments: object) -> T:
    """Call `work`, which uses the blobs, without holding up the event loop for longer than a disk takes."""
    if blobs.threads is None:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(blobs.threads, lambda: work(*arguments))


def check_ref(ref: str) -> str:
    """Raises BadRef unless it is a relative name of plain segments."""
    if _REF.fullmatch(ref) is None:
        raise BadRef(
            f"blob ref {ref!r} must be segments of letters, digits and ._:- joined by '/', none starting with '.'"
        )
    return ref


def seal_of(data: bytes) -> bytes:
    """What a file ends with."""
    return _MARK + hashlib.sha256(data).digest()


def unsealed(ref: str, stored: bytes, sha256: str = "") -> bytes:
    """The bytes before the seal. Raises Damaged."""
    data, seal = stored[:-SEAL_BYTES], stored[-SEAL_BYTES:]
    digest = hashlib.sha256(data)
    if seal != _MARK + digest.digest():
        raise Damaged(f"blob {ref} is damaged: its {len(stored)} bytes are not those that were written")
    if sha256 and digest.hexdigest() != sha256:
        raise Damaged(f"blob {ref} is whole, and not the one that was accepted (SHA-256 {sha256})")
    return data


@contextmanager
def reading(folder: Weights) -> Iterator[Path]:
    """`Blobs.reading` of what `Blobs.at` gave."""
    if isinstance(folder, Path):
        check_folder(folder)
        yield folder
    else:
        with folder.reading() as here:
            yield here


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless the folder is there, and Damaged unless it is as it was written. One that
    `Blobs.new_folder` did not make has no list and is not checked."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder.name}")
    try:
        sums: dict[str, str] = json.loads((folder / SUMS_FILE).read_text())
    except FileNotFoundError:
        return
    except ValueError:
        raise Damaged(f"blob {folder.name} is damaged: its list of files cannot be read") from None
    for name, digest in sums.items():
        try:
            found = sha256_of(folder / name)
        except FileNotFoundError:
            raise Damaged(f"blob {folder.name} is damaged: {name} is missing") from None
        if found != digest and sha256_of(folder / name) != digest:  # read twice, as in `get`
            raise Damaged(f"blob {folder.name} is damaged: {name} is not what was written")


def files_of(folder: Path) -> list[str]:
    """`Blobs.files` by path."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != SUMS_FILE)


def write_sums(folder: Path) -> dict[str, str]:
    """Write the list of a folder's files, and return it."""
    sums = {name: sha256_of(folder / name) for name in files_of(folder)}
    (folder / SUMS_FILE).write_text(json.dumps(sums))
    return sums


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
