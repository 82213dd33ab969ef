"""The contract of blob storage, for data too large for SQL: bodies of operations, results, adapters, checkpoints. Blobs
are kept in a folder (`folder.py`) or a bucket (`objects.py`); `opening.py` opens the one in the settings.

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

#: A ref's form. No segment starts with a dot, which excludes "..", "." and the folder of unfinished writes.
_REF = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*", re.ASCII)
#: Each file ends with this, followed by the SHA-256 of all bytes before.
_MARK = b"sha256:\n"
SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
#: The list in each folder: the SHA-256 of its files, as JSON {name: hex}.
SUMS_FILE = ".sha256.json"


class BadRef(ValueError):
    """The name is not a ref."""


class Damaged(OSError):
    """A blob exists but is not what was written: truncated, overwritten or exchanged."""


class StoreAway(OSError):
    """The object store does not answer, or fails; trying again may help. The message is for people."""

    exit_code = 1


def is_lasting(error: BaseException) -> bool:
    """True if trying again cannot help. False for errors that may be temporary: the disk is full, over a quota, not
    mounted, or unreachable."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | Damaged) or not isinstance(
        error, OSError
    )


class FarFolder(Protocol):
    """A folder that does not lie on this machine."""

    def reading(self) -> AbstractContextManager[Path]:
        """The files of the folder, as in `Blobs.reading`."""


#: A folder of weights, on this machine or elsewhere; it is read within `reading`.
Weights = Path | FarFolder


class Blobs(Protocol):
    """Blob storage. Any number of processes and threads may share one place. Every method raises BadRef for a bad ref,
    and an OSError if the place does not answer (`is_lasting` distinguishes that from a missing blob)."""

    #: A folder on this machine for unfinished writes.
    root: Path
    #: The threads in which an event loop makes calls (`beside_the_loop`); None if calls are short enough for the loop
    #: itself.
    threads: Executor | None

    def put(self, ref: str, data: bytes) -> None:
        """Write the whole blob, replacing what was there; readers see the old bytes or the new, never a part. An
        OSError leaves nothing behind."""

    def get(self, ref: str, sha256: str = "") -> bytes:
        """The bytes of a file blob; with `sha256` (hex), they must have that digest. Raises FileNotFoundError if there
        is none; Damaged if two reads both differ from what was put (network file systems may read short once)."""

    def exists(self, ref: str) -> bool: ...

    def touch(self, ref: str) -> None:
        """Set its age (`listed`) to 0. Raises FileNotFoundError if there is none."""

    def delete(self, ref: str) -> None:
        """Delete a file blob; does nothing if there is none."""

    def delete_tree(self, ref: str) -> None:
        """Delete a folder blob with everything in it, a file blob, or all blobs below `ref`; a missing one is no error.
        Nobody sees it half deleted."""

    def size_bytes(self, ref: str) -> int:
        """Bytes of a file, or of all files in a folder. Raises FileNotFoundError if there is none."""

    def new_folder(self, ref: str) -> AbstractContextManager[Path]:
        """An empty folder to fill; when the block succeeds it becomes `ref`, in place of an older blob."""

    def at(self, ref: str) -> Weights:
        """The folder `ref`, which need not exist: for `reading` it later."""

    def reading(self, ref: str) -> AbstractContextManager[Path]:
        """The files of a folder, on this machine and checked, during the block. Raises FileNotFoundError if there is
        none; Damaged unless it is whole."""

    def check_folder(self, ref: str) -> None:
        """Raise FileNotFoundError unless the folder exists, and Damaged if it is visibly not whole; its files are not
        fetched for this."""

    def files(self, ref: str) -> list[str]:
        """The names of the files in a folder blob, sorted."""

    def listed(self, pattern: str) -> dict[str, float]:
        """The refs that match a pattern such as `ops/*/*`, each with the time of its last write, in seconds since
        1970."""

    def link(self, ref: str, name: str, lasts: timedelta) -> str:
        """A URL with which anybody can read one file of a folder for that long; "" if there are no such links."""

    def clear_unfinished(self, before: float | None = None) -> None:
        """Delete unfinished writes from before then, left by dead writers. None: all of them, at start-up, while
        nothing else writes here."""


async def beside_the_loop(blobs: Blobs, work: Callable[..., T], *arguments: object) -> T:
    """Call `work`, which uses the blobs, so that it holds up the event loop no longer than a disk would."""
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
    """The end of a file blob: mark and digest."""
    return _MARK + hashlib.sha256(data).digest()


def unsealed(ref: str, stored: bytes, sha256: str = "") -> bytes:
    """The bytes before the end mark. Raises Damaged."""
    data, seal = stored[:-SEAL_BYTES], stored[-SEAL_BYTES:]
    digest = hashlib.sha256(data)
    if seal != _MARK + digest.digest():
        raise Damaged(f"blob {ref} is damaged: its {len(stored)} bytes are not those that were written")
    if sha256 and digest.hexdigest() != sha256:
        raise Damaged(f"blob {ref} is whole, and not the one that was accepted (SHA-256 {sha256})")
    return data


@contextmanager
def reading(folder: Weights) -> Iterator[Path]:
    """The files of a folder from `Blobs.at`, as in `Blobs.reading`."""
    if isinstance(folder, Path):
        check_folder(folder)
        yield folder
    else:
        with folder.reading() as here:
            yield here


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless the folder exists, and Damaged unless it is whole. A folder without a list was not
    made by `Blobs.new_folder` and is not checked."""
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
