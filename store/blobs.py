"""Files that are too large for SQL: bodies of operations, results, adapters, checkpoints.

A ref is a relative name such as `ops/3f2a/body`; it may name a file or a folder, and it can never leave the root.
A blob at its ref is always whole: files and folders are written elsewhere and renamed into place.

After `put` returns, the blob survives kill -9 of any process. It survives a power cut only with `durable=True`, which
flushes the file and its folder to the disk at the cost of a few milliseconds for each blob.

Damage is detected on reading. A file ends with the SHA-256 of the bytes before it, which `get` checks and strips; a
folder holds a list of its files with their SHA-256, which `check_folder` checks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: No segment starts with a dot, which excludes "..", "." and the folder of unfinished writes.
_REF = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*", re.ASCII)
_UNFINISHED = ".unfinished"
#: A file ends with this and the SHA-256 of the bytes before it.
_MARK = b"sha256:\n"
SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
#: In each folder: the SHA-256 of its files, as JSON {name: hex}.
SUMS_FILE = ".sha256.json"


class BadRef(ValueError):
    """The name is not a ref."""


class Damaged(OSError):
    """A blob exists but is not what was written: truncated, overwritten or exchanged."""


def is_lasting(error: BaseException) -> bool:
    """Whether trying again cannot help. Other errors of a disk may pass: it is full, over a quota, not mounted, or
    unreachable."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | Damaged) or not isinstance(
        error, OSError
    )


class Blobs:
    """Blobs under one root folder. Any number of processes and threads may share it."""

    def __init__(self, root: Path, *, durable: bool = False) -> None:
        self.root = root
        self.durable = durable
        self._unfinished = root / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def path(self, ref: str) -> Path:
        """The path of `ref`, which need not exist. Raises BadRef unless it is a relative name of plain segments."""
        if _REF.fullmatch(ref) is None:
            raise BadRef(
                f"blob ref {ref!r} must be segments of letters, digits and ._:- joined by '/', none starting with '.'"
            )
        return self.root / ref

    def put(self, ref: str, data: bytes) -> None:
        """Write the whole blob, replacing what was there; readers see the old bytes or the new, never a part. An
        OSError leaves nothing behind."""
        target = self.path(ref)
        temporary = self._temporary()
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.write(_MARK + hashlib.sha256(data).digest())
                if self.durable:
                    file.flush()
                    os.fsync(file.fileno())
            self._rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def get(self, ref: str, sha256: str = "") -> bytes:
        """The bytes of a file blob; with `sha256` (hex), they must have that digest. FileNotFoundError when there is
        none; Damaged when two reads differ from what was put: network file systems may read short once."""
        try:
            return self._whole(ref, sha256)
        except Damaged:
            return self._whole(ref, sha256)

    def _whole(self, ref: str, sha256: str) -> bytes:
        stored = self._stored(ref)
        data, seal = stored[:-SEAL_BYTES], stored[-SEAL_BYTES:]
        digest = hashlib.sha256(data)
        if seal != _MARK + digest.digest():
            raise Damaged(f"blob {ref} is damaged: its {len(stored)} bytes are not those that were written")
        if sha256 and digest.hexdigest() != sha256:
            raise Damaged(f"blob {ref} is whole, and not the one that was accepted (SHA-256 {sha256})")
        return data

    def _stored(self, ref: str) -> bytes:
        return self.path(ref).read_bytes()

    def exists(self, ref: str) -> bool:
        return self.path(ref).exists()

    def delete(self, ref: str) -> None:
        """Delete a file blob, if it is there."""
        self.path(ref).unlink(missing_ok=True)

    def folder(self, ref: str) -> Path:
        """The folder `ref`, made if it is not there: for a writer that wants to fill it in place."""
        folder = self.path(ref)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def new_folder(self, ref: str) -> Iterator[Path]:
        """An empty folder to fill; when the block succeeds it becomes `ref`, in place of an older blob."""
        target = self.path(ref)
        temporary = self._temporary()
        temporary.mkdir()
        try:
            yield temporary
            sums = {name: _sha256(temporary / name) for name in files_of(temporary)}
            (temporary / SUMS_FILE).write_text(json.dumps(sums))
            if self.durable:
                for file in temporary.rglob("*"):
                    _fsync(file)
                _fsync(temporary)
            self._replace(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def files(self, ref: str) -> list[str]:
        """The names of the files in a folder blob, sorted."""
        return files_of(self.path(ref))

    def check_folder(self, ref: str) -> None:
        """Raise FileNotFoundError unless the folder is there, and Damaged unless it is as it was written."""
        check_folder(self.path(ref))

    def delete_tree(self, ref: str) -> None:
        """Delete a folder blob with all in it, or a file blob; nothing happens when there is none.

        The folder is renamed first, so that nobody sees it half deleted."""
        with suppress(FileNotFoundError):
            os.rename(self.path(ref), old := self._temporary())
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink()

    def size_bytes(self, ref: str) -> int:
        """Bytes of a file, or of all files in a folder; FileNotFoundError when there is none."""
        path = self.path(ref)
        if not path.is_dir():
            return max(0, path.stat().st_size - SEAL_BYTES)
        return sum((path / name).stat().st_size for name in files_of(path))

    def clear_unfinished(self) -> None:
        """Delete leftovers of writers that died. Only at start-up, while nothing else writes here."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def _temporary(self) -> Path:
        return self._unfinished / secrets.token_hex(8)

    def _replace(self, temporary: Path, target: Path) -> None:
        """Move a folder to its place; if that fails, the older one stays."""
        old = self._temporary() if target.is_dir() else None
        if old is not None:
            os.rename(target, old)
        try:
            self._rename(temporary, target)
        except BaseException:
            if old is not None:
                os.rename(old, target)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _rename(self, temporary: Path, target: Path) -> None:
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
        if self.durable:
            _fsync(target.parent)


def check_folder(folder: Path) -> None:
    """`Blobs.check_folder` by path. A folder that `Blobs.new_folder` did not make has no list and is not checked."""
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
            found = _sha256(folder / name)
        except FileNotFoundError:
            raise Damaged(f"blob {folder.name} is damaged: {name} is missing") from None
        if found != digest and _sha256(folder / name) != digest:  # read twice, as in `get`
            raise Damaged(f"blob {folder.name} is damaged: {name} is not what was written")


def files_of(folder: Path) -> list[str]:
    """`Blobs.files` by path."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != SUMS_FILE)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
