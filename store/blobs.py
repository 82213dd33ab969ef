"""Files that are too large for SQL: bodies of operations, results, adapters, checkpoints.

A ref is a relative name such as `ops/3f2a/body`; it may name a file or a folder, and it can never leave the root.
Whatever is under its ref is whole: files and folders are written aside and renamed into place.

What a `put` promises: after it returns, the blob survives kill -9 of any process. It survives a power cut only with
`durable=True`, which flushes the file and its folder to the disk at the cost of a few milliseconds for each blob.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Segments start with something else than a dot: that excludes "..", "." and the folder of unfinished writes.
_REF = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*", re.ASCII)
_UNFINISHED = ".unfinished"


class BadRef(ValueError):
    """A name that is not a ref."""


class Blobs:
    """Blobs under one root folder. Any number of processes and threads may share it."""

    def __init__(self, root: Path, *, durable: bool = False) -> None:
        self.root = root
        self.durable = durable
        self._unfinished = root / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def path(self, ref: str) -> Path:
        """Where `ref` is, or would be. Raises BadRef unless it is a relative name of plain segments."""
        if _REF.fullmatch(ref) is None:
            raise BadRef(
                f"blob ref {ref!r} must be segments of letters, digits and ._:- joined by '/', none starting with '.'"
            )
        return self.root / ref

    def put(self, ref: str, data: bytes) -> None:
        """Write the whole blob, replacing what was there; readers see the old bytes or the new, never a part."""
        target = self.path(ref)
        temporary = self._temporary()
        with open(temporary, "wb") as file:
            file.write(data)
            if self.durable:
                file.flush()
                os.fsync(file.fileno())
        self._rename(temporary, target)

    def get(self, ref: str) -> bytes:
        """The bytes of a file blob; FileNotFoundError when there is none."""
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
        """An empty folder to fill; it becomes `ref`, whole and in place of what was there, when the block succeeds."""
        target = self.path(ref)
        temporary = self._temporary()
        temporary.mkdir()
        try:
            yield temporary
            if self.durable:
                for file in temporary.rglob("*"):
                    _fsync(file)
                _fsync(temporary)
            if target.is_dir():
                os.rename(target, old := self._temporary())
                shutil.rmtree(old, ignore_errors=True)
            self._rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def delete_tree(self, ref: str) -> None:
        """Delete a folder blob with all in it, or a file blob; nothing happens when there is none.

        The folder is renamed away first, so that nobody finds half of it."""
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
            return path.stat().st_size
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def clear_unfinished(self) -> None:
        """Delete what writers that died have left. Only for a start, when nobody else writes here."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def _temporary(self) -> Path:
        return self._unfinished / secrets.token_hex(8)

    def _rename(self, temporary: Path, target: Path) -> None:
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
        if self.durable:
            _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
