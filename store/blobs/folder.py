"""Blobs in a folder, which processes on several machines may share (NFS, a ReadWriteMany volume).

Files and folders are written elsewhere and renamed into place. After `put` returns, the blob survives kill -9 of any
process. It survives a power cut only with `durable=True`, which flushes the file and its folder to the disk at the cost
of a few milliseconds for each blob.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import takewhile
from pathlib import Path

from store.blobs.contract import (
    SEAL_BYTES,
    Damaged,
    check_folder,
    check_ref,
    files_of,
    reading,
    seal_of,
    unsealed,
    write_sums,
)

_UNFINISHED = ".unfinished"


class FolderBlobs:
    """`Blobs` under one root folder."""

    threads: Executor | None = None

    def __init__(self, root: Path, *, durable: bool = False) -> None:
        self.root = root
        self.durable = durable
        self._unfinished = root / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)
        self._beginning = f"{root}{os.sep}"  # as a string, since every operation builds paths with it

    def path(self, ref: str) -> Path:
        """The path of `ref`, which need not exist. Raises BadRef unless it is a relative name of plain segments."""
        return self.root / check_ref(ref)

    at = path

    def put(self, ref: str, data: bytes) -> None:
        target = self._beginning + check_ref(ref)
        temporary = f"{self._beginning}{_UNFINISHED}{os.sep}{secrets.token_hex(8)}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.write(seal_of(data))
                if self.durable:
                    file.flush()
                    os.fsync(file.fileno())
            self._rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def get(self, ref: str, sha256: str = "") -> bytes:
        try:
            return unsealed(ref, self._stored(ref), sha256)
        except Damaged:
            return unsealed(ref, self._stored(ref), sha256)

    def _stored(self, ref: str) -> bytes:
        return self.path(ref).read_bytes()

    def exists(self, ref: str) -> bool:
        return self.path(ref).exists()

    def touch(self, ref: str) -> None:
        os.utime(self.path(ref))

    def delete(self, ref: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._beginning + check_ref(ref))

    @contextmanager
    def new_folder(self, ref: str) -> Iterator[Path]:
        target = self.path(ref)
        temporary = self._temporary()
        temporary.mkdir()
        try:
            yield temporary
            write_sums(temporary)
            if self.durable:
                for file in temporary.rglob("*"):
                    _fsync(file)
                _fsync(temporary)
            self._replace(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def reading(self, ref: str) -> AbstractContextManager[Path]:
        return reading(self.path(ref))

    def files(self, ref: str) -> list[str]:
        return files_of(self.path(ref))

    def check_folder(self, ref: str) -> None:
        check_folder(self.path(ref))

    def delete_tree(self, ref: str) -> None:
        """The folder is renamed first, so that nobody sees it half deleted."""
        with suppress(FileNotFoundError):
            os.rename(self.path(ref), old := self._temporary())
            _remove(old)

    def size_bytes(self, ref: str) -> int:
        path = self.path(ref)
        if not path.is_dir():
            return max(0, path.stat().st_size - SEAL_BYTES)
        return sum((path / name).stat().st_size for name in files_of(path))

    def listed(self, pattern: str) -> dict[str, float]:
        found = {}
        for path in self.root.glob(pattern):
            with suppress(FileNotFoundError):
                found[path.relative_to(self.root).as_posix()] = path.stat().st_mtime
        return found

    def link(self, ref: str, name: str, lasts: timedelta) -> str:
        return ""

    def clear_unfinished(self, before: float | None = None) -> None:
        for left in self._unfinished.iterdir():
            with suppress(FileNotFoundError):
                if before is not None and left.stat().st_mtime >= before:
                    continue
                _remove(left)

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

    def _rename(self, temporary: Path | str, target: Path | str) -> None:
        # folders with new entries, which a power cut would lose unless they are flushed
        changed = [os.path.dirname(target)]
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            missing = takewhile(lambda folder: not folder.is_dir(), Path(target).parents)
            changed += [str(folder.parent) for folder in missing]
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(temporary, target)
        if self.durable:
            for folder in changed:
                _fsync(folder)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _fsync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
