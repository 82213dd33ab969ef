"""A worker process: `python -m workers trainer|generator --link-fd N`.

It imports its program, which takes most of the time of a start, and then waits with no model in memory until it is
told what to do: the first message on the link is its `scheduler.links.configs.WorkerConfig`. So one that is started
ahead, to succeed another, is like any other. It leaves when the link ends without a word.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from workers.leave import leave
from workers.say import say_as

#: What `ps` and `top` call a process that waits.
WAITING = "weft-standby"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description="A Weft worker.")
    parser.add_argument("role", choices=("trainer", "generator"))
    parser.add_argument("--link-fd", type=int, required=True, help="inherited file descriptor of the link")
    args = parser.parse_args(argv)
    _rename(WAITING)
    gc.disable()  # what is imported stays: looking through it again and again takes a tenth of the time
    program = importlib.import_module(f"workers.{args.role}.process")
    from scheduler.links.sockets import WorkerLink
    from store import tracing
    from workers.model.base.files import leave_files

    gc.freeze()
    gc.enable()
    link = WorkerLink(args.link_fd)
    try:
        config = link.recv()
    except EOFError:
        return 0
    _rename(f"weft-{args.role}")
    say_as(config.basics)
    code: int = program.main(config, link)
    tracing.stop()
    if config.basics.base_dir:
        leave_files(Path(config.basics.base_dir))
    return code


def _rename(name: str) -> None:
    """Linux only, and only for those who look."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
