"""Runs a command that must not outlive its parent: `python guard.py COMMAND...`, with the parent's pipe as stdin.

vLLM is several processes, which the kernel does not end with the one that started them. All are in this process's
session; when the command ends or the pipe closes (the parent is gone, however it went), all are killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> None:
    if os.getpid() != os.getsid(0):
        os.setsid()
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    ended = os.pidfd_open(command.pid)
    select.select([sys.stdin, ended], [], [])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
