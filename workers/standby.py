"""A worker that is started ahead: `python -m workers.standby workers.trainer ARGUMENTS...`.

It imports the program at once, which takes most of the time of a start, and then waits for its turn with no model in
memory. Whoever started it says so with a line on stdin, and has gone when stdin ends without one.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from workers.leave import leave

#: What `ps` and `top` call a process that waits.
WAITING = "weft-standby"


def main(argv: Sequence[str]) -> int:
    module, *arguments = argv
    _rename(WAITING)
    gc.disable()  # what is imported stays: looking through it again and again takes a tenth of the time
    program = importlib.import_module(f"{module}.__main__")
    gc.freeze()
    gc.enable()
    if not sys.stdin.buffer.read(1):
        return 0
    _rename(f"weft-{module.rpartition('.')[2]}"[:15])
    code: int = program.main(arguments)
    return code


def _rename(name: str) -> None:
    """Linux only, and only for those who look."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
