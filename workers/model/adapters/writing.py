"""What the disk says while a library writes a file for us. Libraries in Rust have errors of their own for it, which
nobody would take for ones that may pass, as a full disk does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

#: As Rust says it, and as it repeats what Python has said.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


@contextmanager
def writing(own: type[Exception] = SafetensorError) -> Iterator[None]:
    """Within it a library writes, whose `own` error is an OSError if it tells what the disk has said."""
    try:
        yield
    except own as error:
        said = _OS_ERROR.search(str(error))
        if said is None:
            raise
        number = int(said[1] or said[2])
        raise OSError(number, os.strerror(number)) from error
