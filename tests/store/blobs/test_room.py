"""How full a disk may be while new work is still accepted, and what the refusal says when it is fuller."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from store.blobs.room import NoRoom, Room, may_pass, what_failed

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "files", "free_files", "said"),
    [
        (1 << 40, 10**6, 10**6, ""),
        (128 * MIB, 10**6, 1000, ""),
        (128 * MIB - 1, 10**6, 1000, "the server's disk is nearly full (127 MiB free, 128 are needed)"),
        (0, 0, 0, "the server's disk is nearly full (0 MiB free, 128 are needed)"),
        (128 * MIB, 10**6, 999, "the server's disk has room for 999 more files only"),
        (128 * MIB, 0, 0, ""),  # a file system that does not count files
    ],
)
def test_room_for_new_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, files: int, free_files: int, said: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=files, f_favail=free_files))
    room = Room(tmp_path, clock=lambda: 0.0)  # a machine that has just started
    if not said:
        room.check()
        return
    with pytest.raises(NoRoom) as refused:
        room.check()
    assert str(refused.value) == f"{said}: nothing new is accepted until there is room; results can be had"


def test_there_is_room_again_when_the_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a write that failed for lack of room nobody knows how much there is: the next write tries, and the log does
    not promise that there is room again."""
    clock, free = [0.0], [128 * MIB]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    room = Room(tmp_path, clock=lambda: clock[0])
    with caplog.at_level("INFO"):
        room.check()
        assert room.refused(OSError(errno.EIO, "sent by a disk")) == (
            f"the server's disk does not answer ({os.strerror(errno.EIO)})"
        )
        clock[0] = 0.5
        with pytest.raises(NoRoom, match="does not answer"):
            room.check()
        clock[0] = 1.0
        room.check()
        assert caplog.messages == []
        for clock[0], free[0] in ((2.0, 0), (3.0, 0), (4.0, 128 * MIB), (5.0, 128 * MIB)):
            with suppress(NoRoom):
                room.check()
    full = "the server's disk is nearly full (0 MiB free, 128 are needed)"
    assert caplog.messages == [
        f"{full}: nothing new is accepted until there is room",
        "there is room again for new work",
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "the server's disk does not answer (TimeoutError)"),
        (RuntimeError("cannot execute INSERT in a read-only transaction"), "the server's database takes no writes"),
        (RuntimeError("attempt to write a readonly database"), "the server's database takes no writes"),
        (RuntimeError("disk I/O error"), "the server's disk does not answer (disk I/O error)"),
        (RuntimeError("database or disk is full"), "the server's disk is full"),
        (RuntimeError("connection refused"), "the server's database does not answer"),
    ],
)
def test_what_failed_is_said_in_words(error: Exception, said: str) -> None:
    assert what_failed(error) == said


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EIO, "x"), True),
        (PermissionError(errno.EACCES, "x"), False),
        (sqlite3.OperationalError("database or disk is full"), True),
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("attempt to write a readonly database"), False),
        (sqlite3.OperationalError("no such table: runs"), False),
    ],
    ids=str,
)
def test_what_may_go_well_later(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
