"""A worker process: `python -m workers trainer|generator --link-fd N`, or the one that forks them, `nursery`.

The first message on a worker's link is its `scheduler.links.configs.WorkerConfig`. It leaves when the link ends without
a word. A nursery's link is its door (`workers.nursery`).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from workers.basics import say_as
from workers.leave import leave
from workers.nursery import NURSERY, Nursery

ROLES = ("trainer", "generator")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description="A Weft worker.")
    parser.add_argument("role", choices=(*ROLES, NURSERY))
    parser.add_argument("--link-fd", type=int, required=True, help="inherited file descriptor of the link")
    args = parser.parse_args(argv)
    _rename(f"weft-{args.role}")
    gc.disable()  # imported objects stay: looking through them again and again takes a tenth of the time
    for role in ROLES if args.role == NURSERY else (args.role,):
        importlib.import_module(f"workers.{role}.process")
    gc.freeze()
    gc.enable()
    if args.role != NURSERY:
        return work(args.role, args.link_fd)
    Nursery(socket.socket(fileno=args.link_fd), work).serve()
    return 0


def work(role: str, link_fd: int) -> int:
    """Do the work of a worker of that role. Returns its exit code."""
    from scheduler.links.configs import OF_ANOTHER_VERSION
    from scheduler.links.messages import FORM
    from scheduler.links.sockets import WorkerLink
    from store import tracing
    from workers.model.base.files import leave_files

    _rename(f"weft-{role}")
    link = WorkerLink(link_fd)
    try:
        config = link.recv()
    except EOFError:
        return 0
    if config.basics.form != FORM:
        return OF_ANOTHER_VERSION
    say_as(config.basics)
    code: int = importlib.import_module(f"workers.{role}.process").main(config, link)
    tracing.stop()
    if config.basics.base_dir:
        leave_files(Path(config.basics.base_dir))
    return code


def _rename(name: str) -> None:
    """Set the process's name, as `ps` and `top` show it. Linux only."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
