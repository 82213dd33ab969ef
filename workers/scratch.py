"""Temporary folders of workers, which are removed with their process. A killed process cannot remove its own, and may
be killed again and again; so the next process of the same kind removes the folders whose process is gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A new folder in the system's temporary one, named after its `kind` and locked while this process lives. Folders
    of that kind whose process is gone are removed now."""
    # until it is locked, no other process may take it for abandoned
    prefix, fresh = f"weft.{kind}-", f"weft-new-{kind}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=fresh))
    folder = new.with_name(new.name.replace(fresh, prefix, 1))
    with ExitStack() as stack:
        with suppress(OSError):  # on a file system without locks nobody removes it
            stack.enter_context(_locked(new))
        new.rename(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """In the block the folder is this process's; the kernel releases the lock, however the process ends. Raises OSError
    if another process or user has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
