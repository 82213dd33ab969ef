"""How a worker process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit at once. To take torch and the interpreter apart costs half a second, and nothing is left to be done: what
    was sent is in the link, files are closed by whoever wrote them, threads are daemons that hold nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
