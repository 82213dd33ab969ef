"""Folders that were read from afar, kept on this machine for the next reading, up to a number of bytes, or until its
disk has little room.

Processes may share one cache. A folder that is being read is locked (`flock`, which ends with its process), and is not
taken away; of the others those go first that were read longest ago. What is read is checked each time.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from store.blobs.contract import SUMS_FILE, Damaged, check_folder, files_of

#: Copies take none of this: a run that is saved, and new work (`store.blobs.room`), need room on the same disk.
LEFT_FREE_BYTES = 4 << 30
#: Being filled, or being deleted.
_UNFINISHED = ".unfinished"


class FolderCache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._unfinished = root / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def reading(self, key: str, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """The folder of that key, which `fetch` fills unless it is here, as it was written. Raises Damaged when it is
        not even when it was fetched again, and what `fetch` raises."""
        path = self._root / key
        lock = self._lock(path)
        try:
            if lock is None:
                lock = self._fetched(path, fetch)
            if _damaged(path):
                self._mend(path, fetch)
                check_folder(path)
            os.utime(path)
            yield path
        finally:
            if lock is not None:
                os.close(lock)

    def new(self) -> Path:
        """An empty folder to fill and to `adopt`."""
        folder = self._unfinished / secrets.token_hex(8)
        folder.mkdir()
        return folder

    def adopt(self, key: str, folder: Path) -> None:
        """Keep a folder that is complete."""
        self._keep(self._root / key, folder)
        self.evict()

    def evict(self) -> None:
        """Delete until no more is here than may be, and the disk has room for what is no copy."""
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        lacking = LEFT_FREE_BYTES - shutil.disk_usage(self._root).free
        excess = max(sum(size for _, _, size in entries) - self._max_bytes, lacking)
        for path, _, size in entries:
            if excess <= 0:
                return
            if self._drop(path):
                excess -= size

    def clear_unfinished(self, before: float | None) -> None:
        for left in self._unfinished.iterdir():
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < (time.time() + 1 if before is None else before):
                    shutil.rmtree(left, ignore_errors=True)

    def _fetched(self, path: Path, fetch: Callable[[Path], None]) -> int:
        """The lock of a folder that was just fetched."""
        while True:
            folder = self.new()
            try:
                fetch(folder)
                self._keep(path, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            lock = self._lock(path)
            if lock is not None:  # else another process has taken it away at once
                self.evict()
                return lock

    def _mend(self, path: Path, fetch: Callable[[Path], None]) -> None:
        """Fetch again what is damaged. Others may be reading the folder, so it stays, and its files are replaced."""
        folder = self.new()
        try:
            fetch(folder)
            for name in (*files_of(folder), SUMS_FILE):
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, path / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, path: Path, folder: Path) -> None:
        try:
            os.rename(folder, path)
        except OSError:
            if not path.is_dir():
                raise
            shutil.rmtree(folder, ignore_errors=True)  # another reader was faster, with the same files

    def _lock(self, path: Path) -> int | None:
        """Keep the folder here until the descriptor is closed; None when it is not here."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
        return None

    def _drop(self, path: Path) -> bool:
        """Delete a folder unless somebody reads it."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old = self._unfinished / secrets.token_hex(8)
            os.rename(path, old)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True
        finally:
            os.close(descriptor)
        shutil.rmtree(old, ignore_errors=True)
        return True

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        """Folders, when they were last read, and their bytes."""
        for path in self._root.iterdir():
            if path.name != _UNFINISHED:
                with suppress(FileNotFoundError):
                    size = sum(file.stat().st_size for file in path.rglob("*"))
                    yield path, path.stat().st_mtime, size


def _damaged(path: Path) -> bool:
    try:
        check_folder(path)
    except (Damaged, FileNotFoundError):
        return True
    return False
