"""A cache on this machine of folders read from a bucket, up to a number of bytes, and only while the disk has room.

Processes may share one cache. A folder that is being read is locked (by `flock`, which ends with its process) and is
not deleted; of the others, those read longest ago go first. Each reading checks the files.
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

#: How much of the disk copies leave free: saved runs and new work (`store.blobs.room`) need room on the same disk.
LEFT_FREE_BYTES = 4 << 30
#: Prefixes of folders that are being filled, or deleted.
_UNFINISHED = ".unfinished"


class FolderCache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._unfinished = root / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def reading(self, key: str, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """The folder of that key, checked; `fetch` fills it if it is missing or damaged. Raises Damaged if it is still
        damaged after that, and the errors of `fetch`."""
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
        """A new empty folder, to be filled and then given to `adopt`."""
        folder = self._unfinished / secrets.token_hex(8)
        folder.mkdir()
        return folder

    def adopt(self, key: str, folder: Path) -> None:
        """Add a complete folder to the cache."""
        self._keep(self._root / key, folder)
        self.evict()

    def evict(self) -> None:
        """Delete folders until the cache is within its limit, and the disk has room for other things."""
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
        """Fetch a folder. Returns the descriptor of the lock on it."""
        while True:
            folder = self.new()
            try:
                fetch(folder)
                self._keep(path, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            lock = self._lock(path)
            if lock is not None:  # otherwise another process has deleted it at once
                self.evict()
                return lock

    def _mend(self, path: Path, fetch: Callable[[Path], None]) -> None:
        """Fetch a damaged folder again. It stays in place, since others may be reading it, and its files are replaced
        one by one."""
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
        """Lock a folder, so that it stays until the descriptor is closed; None if it is not in the cache."""
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
        """For each folder of the cache: its path, the time at which it was last read, and its bytes."""
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
