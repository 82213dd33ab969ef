"""How a worker process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit at once. Taking torch and the interpreter down costs half a second, and nothing is left to do: sent messages
    are in the link, files were closed by whoever wrote them, threads are daemons that hold nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
