"""How a process ends: with its own exit code, whatever has become of its outputs."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit at once. Taking torch and the interpreter down costs half a second, and nothing is left to do: sent messages
    are in the link, files were closed by whoever wrote them, threads are daemons that hold nothing."""
    let_go()
    os._exit(code)


def let_go() -> None:
    """Write what stdout and stderr still hold. What finds no room is lost: Python would try once more at its end, and
    exit with 120."""
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
