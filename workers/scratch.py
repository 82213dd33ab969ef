"""Temporary folders of workers, which go with their process. One that is killed cannot remove its own, and what kills
it may do so again and again: the next of its kind removes those that no process has.
"""

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
    """A new folder in the system's temporary one, of a process that is there: named after the `kind` of what is in it,
    and locked. Those of that kind whose process is gone are removed now."""
    prefix, fresh = f"weft.{kind}-", f"weft-new-{kind}-"  # until it is locked nobody may take it for left
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=fresh))
    folder = new.with_name(new.name.replace(fresh, prefix, 1))
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, of which nobody takes it then
            stack.enter_context(_locked(new))
        new.rename(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within it the folder is this process's; the kernel frees it, however that ends. OSError where it is another
    process's or user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
