"""Python programs that start at once in processes of their own: each is forked from one process that has imported what
most of them would. For tests of what such processes do; how they start is tested with real ones."""

from __future__ import annotations

import math
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from api.server.workers import nursery
from workers import __main__ as workers
from workers.leave import leave
from workers.nursery import die_with_parent

#: The process that forks. It is started with the first program.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Around(NamedTuple):
    """What a process gets from the one that starts it."""

    folder: str
    environment: dict[str, str]
    umask: int
    log: Path | None
    link: socket.socket | None


class Forked:
    """Like `subprocess.Popen` of `python` with `arguments` (`-m module ...` or `-c code ...`) and pipes of text. A
    `log` is the file to which its stderr is appended; of a `link` it has a copy, whose number is its last argument."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        link: socket.socket | None = None,
    ) -> None:
        ours, theirs = zip(*(_pipe(number) for number in range(3)), strict=True)
        os.umask(umask := os.umask(0))
        around = Around(os.getcwd(), dict(os.environ if env is None else env), umask, log, link)
        self._process = CONTEXT.Process(target=_run, args=(arguments, around, *theirs), daemon=True)
        self._process.start()
        for end in theirs:
            end.close()
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(os.dup(end.fileno()), "r" if number else "w") for number, end in enumerate(ours)
        )
        assert self._process.pid is not None
        self.pid = self._process.pid
        for end in ours:
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"it has not ended within {timeout} s")
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints on stdout and on stderr, until it ends."""
        if not self.stdin.closed:
            self.stdin.close()
            with self.stdout, self.stderr, ThreadPoolExecutor() as beside:
                complaints = beside.submit(self.stderr.read)
                self._said = self.stdout.read(), complaints.result()
        self.wait(timeout)
        return self._said


def run_forked(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of `python` with these arguments, with all output captured."""
    forked = Forked(*arguments, env=env)
    forked.stdin.write(stdin)
    said, complaints = forked.communicate()
    return subprocess.CompletedProcess(arguments, forked.wait(), said, complaints)


def _pipe(number: int) -> tuple[Connection, Connection]:
    """The two ends of a pipe: ours and theirs."""
    read, write = CONTEXT.Pipe(duplex=False)
    return (read, write) if number else (write, read)


def _run(arguments: tuple[str, ...], around: Around, *ends: Connection) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0)
    os.umask(around.umask)
    if around.log is not None:
        with around.log.open("a") as log:
            os.dup2(log.fileno(), 2)
    if os.environ.get("PYTHONPATH") == around.environment.get("PYTHONPATH"):  # else it would not have imported the same
        nursery.Popen = ForkedNursery  # type: ignore[assignment, attr-defined]
        os.execv = _in_place  # type: ignore[assignment]
    os.environ.clear()
    os.environ.update(around.environment)
    os.chdir(around.folder)
    kind, program, *rest = arguments
    if around.link is not None:
        rest.append(str(around.link.detach()))
    sys.argv = [program if kind == "-m" else kind, *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})


def _in_place(program: str, command: Sequence[str]) -> NoReturn:
    """Replaces `os.execv` in a worker, as everything is imported already. What else this process has stays."""
    leave(workers.main(command[command.index("workers") + 1 :]))


class ForkedChild:
    """Like a `subprocess.Popen` of a process that does `work`, with everything imported already. `kept` are the
    descriptors that it has, beside the standard ones. It ends with this process, unless it `stays`."""

    def __init__(
        self, work: Callable[[], object], environment: Mapping[str, str], *kept: int, stays: bool = False
    ) -> None:
        parent = os.getpid()
        if pid := os.fork():
            self.pid = pid
            self._code: int | None = None
            return
        try:
            if not stays:
                die_with_parent()
            if stays or os.getppid() == parent:
                os.setsid()
                os.environ.update(environment)
                for low, high in pairwise((2, *kept, os.sysconf("SC_OPEN_MAX"))):
                    os.closerange(low + 1, high)
                work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.01)


class ForkedNursery(ForkedChild):
    """Replaces `subprocess.Popen` in a forked server, for its workers' nursery."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int], **others: Any) -> None:
        def work() -> None:
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

            subprocess_handler.Popen = ForkedRank  # type: ignore[assignment, attr-defined, misc]
            workers.main(command[command.index("workers") + 1 :])

        super().__init__(work, env, *pass_fds)


class ForkedRank(ForkedChild):
    """Replaces torchrun's `subprocess.Popen` of a rank in a trainer that such a nursery has forked. The ranks of a
    worker of replicas are started as an operator's are."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **others: Any) -> None:
        def work() -> None:
            from workers.trainer.ranks import process as ranks

            Path("/proc/self/comm").write_text(f"weft-rank-{env['RANK']}")
            leave(ranks.main(args[-2], int(args[-1])))

        super().__init__(work, env)
