"""Errors of the disk while a library writes a file for us. Libraries in Rust raise errors of their own for them, which
would not be recognised as temporary, like a full disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

#: A disk's error as Rust words it, or as it repeats Python's.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


@contextmanager
def writing(own: type[Exception] = SafetensorError) -> Iterator[None]:
    """In the block a library writes; its `own` error is raised as an OSError if it reports an error of the disk."""
    try:
        yield
    except own as error:
        said = _OS_ERROR.search(str(error))
        if said is None:
            raise
        number = int(said[1] or said[2])
        raise OSError(number, os.strerror(number)) from error
