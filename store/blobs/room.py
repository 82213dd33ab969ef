"""Whether there is room on the disk for new work.

Accepted work must be finished and its results stored, so new work is refused while some space is still free. A disk may
also refuse a write although space is free (a quota, an unreachable server): then it counts as full for a while.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from store.blobs.contract import StoreAway

#: Below this many free bytes no new work is accepted: several times as much as work in flight needs.
LEAST_FREE_BYTES = 128 << 20
#: Seconds between two looks at the disk; a disk that has refused a write counts as full for as long.
LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class NoRoom(Exception):
    """No new work can be stored for now; the message says why. Try again later."""


class Room:
    """The free space of the file system of `folder`. `clock` returns seconds, as time.monotonic."""

    def __init__(
        self, folder: Path, least_free_bytes: int = LEAST_FREE_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._least, self._clock = folder, least_free_bytes, clock
        self._looked = -LOOK_EVERY_S
        self._why = ""  # why nothing is accepted: a write failed, or
        self._seen = ""  # the last look found no room

    def check(self) -> None:
        """Raise NoRoom if new work cannot be stored."""
        if self._clock() - self._looked >= LOOK_EVERY_S:
            before, self._seen = self._seen, self._look()
            self._looked, self._why = self._clock(), self._seen
            if self._seen and not before:
                log.warning("%s: nothing new is accepted until there is room", self._seen)
            elif before and not self._seen:
                log.info("there is room again for new work")
        if self._why:
            raise NoRoom(f"{self._why}: nothing new is accepted until there is room; results can be had")

    def refused(self, error: BaseException) -> str:
        """Note that a write failed; returns the message for people. A disk that failed counts as full until the next
        look."""
        if isinstance(error, OSError):
            self._looked, self._why = self._clock(), what_failed(error)
        return what_failed(error)

    def _look(self) -> str:
        try:
            free = shutil.disk_usage(self._folder).free
            inodes = os.statvfs(self._folder)
        except OSError as error:
            return what_failed(error)
        if free < self._least:
            return f"the server's disk is nearly full ({free >> 20} MiB free, {self._least >> 20} are needed)"
        if inodes.f_files and inodes.f_favail < 1000:
            return f"the server's disk has room for {inodes.f_favail} more files only"
        return ""


#: Words in errors of SQLite and PostgreSQL, and what people are told. SQLite's I/O errors include a disk that has
#: become read-only.
_DATABASES_SAY = {
    "read-only": "the server's database takes no writes",
    "readonly": "the server's database takes no writes",
    "disk is full": "the server's disk is full",
    "disk I/O error": "the server's disk does not answer (disk I/O error)",
}
_NO_ANSWER = "the server's database does not answer"
#: Errors of files that may pass: no room, or a disk that does not answer.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}


def may_pass(error: BaseException) -> bool:
    """Whether a disk, or a database in a file, may do it later: it was full, in use, or did not answer."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return any(words in str(error) for words in ("disk is full", "disk I/O error", "database is locked"))


def what_failed(error: BaseException) -> str:
    """The message for people: why something was not stored."""
    if isinstance(error, StoreAway):
        return str(error)
    if not isinstance(error, OSError):
        return next((told for words, told in _DATABASES_SAY.items() if words in str(error)), _NO_ANSWER)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the server's disk is full ({os.strerror(error.errno)})"
    return f"the server's disk does not answer ({os.strerror(error.errno) if error.errno else type(error).__name__})"
