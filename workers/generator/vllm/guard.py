"""Runs a command that must not outlive its parent: `python guard.py COMMAND...`, with the parent's pipe as stdin.

vLLM is several processes, which the kernel does not end with the one that started them. All are in one process group;
when the command ends or the pipe closes (the parent is gone, however it went), all are killed. Should this process
itself be killed, the kernel ends the command with it.

Python's trackers of shared memory are not killed: they end by themselves once the processes that they track are gone,
and remove what those have left.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

#: prctl(2): the signal that a process gets when its parent has died.
PR_SET_PDEATHSIG = 1


def main() -> None:
    prctl, guard = ctypes.CDLL(None).prctl, os.getpid()
    if guard != os.getsid(0):
        os.setsid()

    def end_with_guard() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # the parent died before that call
            os._exit(1)

    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=end_with_guard)
    ended = os.pidfd_open(command.pid)
    select.select([sys.stdin, ended], [], [])
    while others := [process for process in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_to_end(process)]:
        for process in others:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def is_to_end(process: int) -> bool:
    """True for a process that has to be ended: another one of this process group, which is alive and no resource
    tracker of Python's."""
    try:
        if process == os.getpid() or os.getpgid(process) != os.getpgid(0):
            return False
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"multiprocessing.resource_tracker" not in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return False


if __name__ == "__main__":
    main()
