"""The files in which workers of one host keep a base's weights together: who may map one, who fills it, who removes it.

A file lies in `FOLDER/weft-UID` and is named by all that decides its bytes (`shared_base.py`). Whoever maps it holds a
shared lock on it, whoever fills or removes it an exclusive one; the kernel frees the locks of a process, however it
ends. So whoever comes while it is filled waits; whoever dies leaves it to the others; and what a killed loader has
left, a file without the mark that is written last, is filled again. A file that nobody maps is removed by the next
process that starts or ends (`remove_unused`), and so is the lock of a holder (`holder.py`) that is no more.

No torch: the server removes what its workers leave.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: The mark written after the complete weights.
_MARK = b"weft base, complete"

#: Pause between looks whether another process still fills a file.
_SOON_S = 0.01

#: The files that this process maps: descriptors, each with a lock, until `leave_files`.
_held: list[int] = []


class CannotShare(RuntimeError):
    """The folder cannot hold the weights; the message says why, and what to do."""


def hold(folder: Path, name: str, size_bytes: int, fill: Callable[[int], None]) -> tuple[int, bool]:
    """A descriptor of the complete file of `size_bytes`, which nobody removes while this process lives, and whether
    this call has had it filled: `fill` writes to the descriptor it is given. Raises CannotShare, and what `fill`
    does."""
    path = own_folder(folder) / name
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        filled = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _complete(descriptor, size_bytes):
                if not _alone(descriptor):
                    _let_go(descriptor)
                    continue
                if is_at(descriptor, path) and not _complete(descriptor, size_bytes):
                    with _removed_if_it_fails(path):
                        _reserve(descriptor, folder, size_bytes)
                        fill(descriptor)
                        os.pwrite(descriptor, _MARK, size_bytes)
                    filled = True
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_at(descriptor, path) and _complete(descriptor, size_bytes):
                _held.append(descriptor)
                return descriptor, filled
        except BaseException:
            _let_go(descriptor)
            raise
        _let_go(descriptor)


def leave_files(folder: Path) -> None:
    """At the end of a process: release its files, and remove those that nobody maps. The process may go on reading
    them."""
    while _held:
        _let_go(_held.pop())
    remove_unused(folder)


def remove_unused(folder: Path, but: str = "", within_s: float = 0.0) -> None:
    """Remove the files that no process maps, except `but` and those that cannot be removed; and ask unused holders to
    end, waiting at most `within_s` until they have and their memory is free."""
    asked: list[socket.socket] = []
    with suppress(CannotShare, OSError):
        for path in own_folder(folder).iterdir():
            if path.stem == but:
                continue
            with suppress(OSError):
                if path.is_socket():
                    asked.append(_ask_to_leave(path))
                    continue
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if is_at(descriptor, path):
                        path.with_suffix(".sock").unlink(missing_ok=True)  # of a holder that was killed
                        path.unlink()
                finally:
                    os.close(descriptor)
    until = time.monotonic() + within_s
    for link in asked:
        with link, suppress(OSError):
            link.settimeout(max(0.0, until - time.monotonic()))
            link.recv(1)


def _ask_to_leave(path: Path) -> socket.socket:
    """Ask a holder to end, by an empty message. The connection is closed when the holder ends, or at once if it
    stays."""
    link = socket.socket(socket.AF_UNIX)
    try:
        with at_folder(path.parent) as folder:
            link.settimeout(1)
            link.connect(f"{folder}/{path.name}")
            link.sendall(bytes(4))
    except OSError:
        link.close()
        raise
    return link


@contextmanager
def at_folder(folder: Path) -> Iterator[str]:
    """A short path to the folder, since the path of a socket has at most 108 bytes."""
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def stored_bytes(folder: Path) -> int:
    """How much memory the existing files take; 0 on a disk, whose cache the kernel gives up."""
    with suppress(CannotShare, OSError):
        if _in_memory(folder):
            return sum(path.stat().st_size for path in own_folder(folder).iterdir())
    return 0


def _in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount[2] == number and mount[mount.index("-") + 1] in ("tmpfs", "ramfs") for mount in mounts)


def _let_go(descriptor: int) -> None:
    """Close a file and unlock it: a mapping holds a duplicate descriptor, which would keep the lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def own_folder(folder: Path) -> Path:
    """This user's folder inside of a folder that several users may share."""
    own = folder / f"weft-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        found = own.lstat()
    except OSError as error:
        raise CannotShare(f"{folder} cannot be used ({error.strerror}); set base_dir") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CannotShare(f"{own} is not a folder of this user alone; remove it, or set base_dir")
    return own


def _alone(descriptor: int) -> bool:
    """Exchange the shared lock for an exclusive one, or for none, without waiting: if two processes find a file
    incomplete, the one that fills it keeps a lock for its whole life. Others may have had the lock in between."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_SOON_S)
        return False
    return True


def _complete(descriptor: int, size_bytes: int) -> bool:
    whole = size_bytes + len(_MARK)
    return os.fstat(descriptor).st_size == whole and os.pread(descriptor, len(_MARK), size_bytes) == _MARK


def is_at(descriptor: int, path: Path) -> bool:
    """True if the open file is still the one at that path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _reserve(descriptor: int, folder: Path, size_bytes: int) -> None:
    """Reserve the disk space before writing: if a mapped file finds none later, its writer is killed."""
    os.ftruncate(descriptor, 0)
    whole, room = size_bytes + len(_MARK), os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    problem = (
        f"{folder} has {free >> 20:,} MiB free and the base takes {whole >> 20:,}; make it larger, or set base_dir"
    )
    if whole > free:
        raise CannotShare(problem)
    try:
        os.posix_fallocate(descriptor, 0, whole)
    except OSError as error:
        raise CannotShare(f"{problem} ({error.strerror})") from None


@contextmanager
def _removed_if_it_fails(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
