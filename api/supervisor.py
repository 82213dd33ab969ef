"""The worker processes of an embedded service: started, watched, restarted, and stopped.

Each worker is a child process with a socket pair to this one. A worker counts as attached once it has said its first
word on the link: then its model is loaded. Nothing here knows what the words mean; `attach` does.

No worker outlives the server. On Linux the kernel kills it with its parent, and everywhere it ends when its link
closes. A worker that dies is started again, soon at first and then with growing pauses.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from store.settings import GeneratorSettings, Settings, SettingsError, TrainerSettings

log = logging.getLogger(__name__)

#: Takes over the server's end of a link (and closes it); ends when the link has closed.
Attach = Callable[[str, socket.socket], Awaitable[None]]

#: After this many starts that led nowhere, and none that did, something is wrong that will not pass.
START_ATTEMPTS = 5
#: A worker whose link has closed should be about to exit; after this long it is killed.
LINGER_S = 5.0
#: Between SIGTERM and SIGKILL.
TERMINATE_S = 3.0

_ROOT = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class WorkerFailed(RuntimeError):
    """A worker did not come up, however often it was started."""


@dataclass
class Backoff:
    """The pause before a restart: it doubles with every short life and begins anew after a healthy one."""

    first_s: float = 0.1
    most_s: float = 5.0
    healthy_s: float = 30.0
    _next_s: float = field(default=0.0, init=False)

    def pause_s(self, lived_s: float) -> float:
        pause = self.first_s if lived_s >= self.healthy_s or not self._next_s else self._next_s
        self._next_s = min(2 * pause, self.most_s)
        return pause


@dataclass(frozen=True)
class WorkerProgram:
    """What to run for a role: trainer, generator, generator-2, ... `--link-fd N` is added to the command."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerStatus:
    """A worker as an operator sees it. `last_exit` says how the process before this one ended."""

    role: str
    pid: int | None
    attached: bool
    restarts: int
    last_exit: str | None


def embedded_workers(settings: Settings, models: Mapping[str, Path]) -> list[WorkerProgram]:
    """One trainer and the generators, on this machine, for these models."""
    common = ["--data-dir", str(settings.data_dir)]
    for name, path in models.items():
        common += ["--model", f"{name}={path}"]
    trainer = ["--snapshot-every-tokens", str(settings.trainer.snapshot_every_tokens)]
    trainer += ["--resident-bytes", str(settings.trainer.resident_bytes)]
    trainer += ["--host-bytes", str(settings.trainer.host_bytes)]
    generator = ["--slots", str(settings.generator.slots), "--prefill-tokens", str(settings.generator.prefill_tokens)]
    generator += ["--kv-tokens", str(settings.generator.kv_tokens)]
    generator += ["--prefix-bytes", str(settings.generator.prefix_cache_bytes)]
    programs = [_python_worker("trainer", settings.trainer, [*common, *trainer])]
    urls = list(settings.generator.vllm.urls)
    if urls and len(models) > 1:
        raise SettingsError("generator.vllm.urls: a vLLM server has one base model, and this service has several")
    for number, kind in enumerate(settings.generator.kinds, start=1):
        role = "generator" if number == 1 else f"generator-{number}"
        engine = _vllm_arguments(settings, role, urls.pop(0) if urls else "") if kind == "vllm" else []
        programs.append(_python_worker(role, settings.generator, [*common, *generator, *engine]))
    return programs


def _vllm_arguments(settings: Settings, role: str, url: str) -> list[str]:
    vllm = settings.generator.vllm
    found = ["--engine", "vllm", "--vllm-folder", str(settings.data_dir / "vllm" / role)]
    found += ["--vllm-url", url] if url else ["--vllm-program", str(vllm_program(settings))]
    found += ["--vllm-adapters", str(vllm.max_adapters), "--vllm-rank", str(vllm.max_rank)]
    return [*found, "--vllm-kv-bytes", str(vllm.kv_bytes)]


def vllm_program(settings: Settings) -> Path:
    """The `vllm` command. Raises SettingsError when it is not there."""
    program = settings.generator.vllm.program
    found = program.expanduser().absolute() if program.name else _ROOT / ".vllm" / "bin" / "vllm"
    if not found.is_file():
        raise SettingsError(f"there is no vLLM at {found}: run `make vllm`, or set [generator.vllm] program or urls")
    return found


def _python_worker(role: str, settings: TrainerSettings | GeneratorSettings, arguments: Sequence[str]) -> WorkerProgram:
    # -P: a folder named `workers` in the working directory must not be taken for ours.
    command = [sys.executable, "-P", "-m", f"workers.{role.partition('-')[0]}", *arguments]
    command += ["--device", settings.device, "--dtype", settings.dtype, "--threads", str(settings.threads)]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return WorkerProgram(
        role,
        command,
        {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(settings.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        },
    )


class Supervisor:
    """Keeps one process alive for each program, from `start` to `stop`, within one event loop."""

    def __init__(self, programs: Sequence[WorkerProgram], attach: Attach) -> None:
        self._keepers = [_Keeper(program, attach) for program in programs]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers; they attach when they are ready, which `wait_attached` awaits."""
        self._tasks = [asyncio.create_task(keeper.keep()) for keeper in self._keepers]

    async def wait_attached(self) -> None:
        """Until every worker has attached once. WorkerFailed when one does not come up."""
        await asyncio.gather(*(keeper.came_up() for keeper in self._keepers))

    def retire(self) -> None:
        """Do not restart from now on: call it before workers are told to drain."""
        for keeper in self._keepers:
            keeper.retired.set()

    async def stop(self, grace_s: float) -> None:
        """Give workers that were told to drain `grace_s` to exit, then terminate, then kill. None is left after."""
        self.retire()
        for keeper in self._keepers:
            if keeper.loading:  # it holds no work, and nobody could tell it to drain
                keeper.signal(signal.SIGTERM)
        if not await self._all_ended(grace_s):
            for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
                for keeper in self._keepers:
                    keeper.signal(number)
                if await self._all_ended(wait_s):
                    break
        await asyncio.gather(*self._tasks)

    def status(self) -> list[WorkerStatus]:
        return [keeper.status() for keeper in self._keepers]

    async def _all_ended(self, timeout_s: float | None) -> bool:
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
        return not pending


class _Keeper:
    """One worker and its successors."""

    def __init__(self, program: WorkerProgram, attach: Attach) -> None:
        self.program = program
        self.retired = asyncio.Event()
        self.attached = False
        self.loading = False
        self._attach = attach
        self._ever_attached = asyncio.Event()
        self._failed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._last_exit: str | None = None

    async def keep(self) -> None:
        backoff = Backoff()
        while not self.retired.is_set():
            self._starts += 1
            started = time.monotonic()
            self._last_exit = await self._live()
            if self.retired.is_set():
                log.info("%s %s", self.program.role, self._last_exit)
                return
            if self._starts == START_ATTEMPTS and not self._ever_attached.is_set():
                self._failed.set()
            pause_s = backoff.pause_s(time.monotonic() - started)
            log.warning("%s %s; it is started again in %.1f s", self.program.role, self._last_exit, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.retired.wait(), pause_s)

    async def came_up(self) -> None:
        waits = {asyncio.create_task(event.wait()) for event in (self._ever_attached, self._failed)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._ever_attached.is_set():
            raise WorkerFailed(
                f"the {self.program.role} did not come up in {self._starts} starts: it {self._last_exit}"
            )

    def signal(self, number: signal.Signals) -> None:
        """To the worker and all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def status(self) -> WorkerStatus:
        pid = self._process.pid if self._process is not None else None
        return WorkerStatus(self.program.role, pid, self.attached, max(0, self._starts - 1), self._last_exit)

    async def _live(self) -> str:
        """One life of the worker, until process and link have both ended. Returns how it ended."""
        ours, theirs = socket.socketpair()
        try:
            self._process = process = await self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            return f"could not be started: {error}"
        finally:
            theirs.close()
        self.loading = True
        output = asyncio.create_task(self._pass_on(process.stdout))
        link = asyncio.create_task(self._talk(ours))
        exited = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({link, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await asyncio.wait({exited}, timeout=LINGER_S)
            self.signal(signal.SIGKILL)  # also what it may have left behind
            code = await exited
            self._process = None
            await asyncio.gather(link, output)
        finally:
            self.signal(signal.SIGKILL)
            self._process = None
        return _how_it_ended(code)

    async def _spawn(self, link_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.program.command,
            "--link-fd",
            str(link_fd),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.program.environment},
            pass_fds=(link_fd,),
            start_new_session=True,  # Ctrl-C at a terminal reaches the server only, which then drains
            preexec_fn=_die_with_parent,
        )

    async def _talk(self, sock: socket.socket) -> None:
        """Wait for the worker's first word, then hand the link over until it closes."""
        sock.setblocking(False)
        if not await _has_spoken(sock):
            sock.close()
            return
        self.attached, self.loading = True, False
        self._ever_attached.set()
        log.info("%s attached (pid %s)", self.program.role, self._process.pid if self._process else "?")
        try:
            await self._attach(self.program.role, sock)
        except Exception:
            log.exception("the link to the %s failed", self.program.role)
        finally:
            self.attached = False

    async def _pass_on(self, stream: asyncio.StreamReader | None) -> None:
        """What the worker prints goes to this process's stderr, each line with the worker's name."""
        assert stream is not None
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._print(line)
        if rest:
            self._print(rest)

    def _print(self, line: bytes) -> None:
        print(f"[{self.program.role}] {line.decode(errors='replace')}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """In the child, before it runs its program: have the kernel kill it when the server dies, even by SIGKILL."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _has_spoken(sock: socket.socket) -> bool:
    """Wait for a byte, and leave it where it is. False when the link closed without one."""
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(sock, said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(sock)
    with suppress(ConnectionResetError):
        return bool(sock.recv(1, socket.MSG_PEEK))
    return False


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
