"""Runs a command that must not outlive its parent: `python guard.py COMMAND...`, with the parent's pipe as stdin.

vLLM is several processes, which the kernel does not end with the one that started them. All are in this process's
session; when the command ends or the pipe closes (the parent is gone, however it went), all are killed. Should this
process itself be killed, the kernel ends the command with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

#: prctl(2): the signal that a process gets when its parent has died.
PR_SET_PDEATHSIG = 1


def main() -> None:
    prctl, guard = ctypes.CDLL(None).prctl, os.getpid()
    if guard != os.getsid(0):
        os.setsid()

    def end_with_guard() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # which has died before that
            os._exit(1)

    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=end_with_guard)
    ended = os.pidfd_open(command.pid)
    select.select([sys.stdin, ended], [], [])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
