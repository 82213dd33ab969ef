"""Sandboxes on this machine, by bubblewrap: namespaces of their own, no network, no file of the host but /usr.

A sandbox is a file system in memory, of limited size, which a *holder* keeps: a process in a user and a mount namespace
of its own that waits until its standard input is closed. A command runs in that file system behind bubblewrap, in new
namespaces for users, processes, network, mounts and IPC, so it sees no process but its own, and ends with all of them
at once (the kernel kills a namespace whose first process dies). If this process dies, holder and commands die with it.

Limits are resource limits of a process, and a look at the memory of all of a command's processes every 50 ms. A filter
(`seccomp.py`) refuses what reserves memory that neither sees. What the kernel holds for sockets and pipes is bounded by
`processes` times `open_files` alone.

Where this process is root, sandboxes run as users that nobody else is: limits on processes do not hold for root.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import platform
import secrets
import shutil
import time
from asyncio import StreamReader
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.rl.sandboxes import seccomp
from weft.rl.sandboxes.sandbox import FOLDER, CannotIsolateError, Done, Limit, Limits, Quota, SandboxError, Snapshot

logger = logging.getLogger("weft")

#: The programs that are needed, each with its Debian package.
NEEDED = {"bwrap": "bubblewrap", "nsenter": "util-linux", "unshare": "util-linux", "prlimit": "util-linux"}
#: How often the memory of commands is checked.
LOOK_S = 0.05
#: How long a holder may take to start; and how long the processes of an ended command may take to end.
_STARTED_S, _ENDED_S = 10.0, 5.0
#: The first user id of sandboxes if this process is root: far above those of systems and containers.
_USERS = 1 << 30
_HOLD = (
    "mount -t tmpfs -o size={size},nr_inodes={nodes},mode=0755 tmpfs /mnt"
    " && mkdir /mnt/work /mnt/tmp && echo && exec cat"
)
_WHERE = (
    "Linux and its user namespaces are needed. They may be switched off (sysctl user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), and containers often"
    " forbid them (docker: --security-opt seccomp=unconfined)"
)


class Local:
    """At most `most` sandboxes at a time. `read_only` are folders of the host, besides /usr, that commands may read;
    users other than the owner must be allowed to read them."""

    def __init__(self, limits: Limits | None = None, *, most: int = 64, read_only: tuple[str, ...] = ()) -> None:
        self.limits, self.most, self.read_only = limits or Limits(), most, read_only
        self.open = 0
        self._tried = False

    async def quota(self) -> Quota:
        """The quota, from `most` and the free memory. Raises CannotIsolateError if no sandbox can be made."""
        await self._try()
        each = self.limits.memory_bytes + self.limits.disk_bytes
        fit = _free_bytes() // each
        if fit < self.most - self.open:
            return Quota(fit, f"{_free_bytes() >> 20} MiB of memory are free, a sandbox may take {each >> 20}")
        return Quota(self.most - self.open, f"most={self.most}, {self.open} are open")

    async def create(self, snapshot: Snapshot | None = None) -> LocalSandbox:
        await self._try()
        return await self._made(snapshot)

    async def _made(self, snapshot: Snapshot | None) -> LocalSandbox:
        if self.open >= self.most:
            raise SandboxError(f"{self.open} sandboxes are open, most={self.most}: close some, or allow more")
        self.open += 1
        try:
            box = LocalSandbox(self, *await _holder(self.limits))
        except BaseException:
            self.open -= 1
            raise
        try:
            if snapshot is not None:
                await box.unpack(snapshot.held)
        except BaseException:
            await box.close()
            raise
        return box

    async def _try(self) -> None:
        """Check once whether code in a sandbox is isolated. Raises CannotIsolateError."""
        if self._tried:
            return
        missing = sorted({package for tool, package in NEEDED.items() if shutil.which(tool, path=_PATH) is None})
        if missing:
            raise CannotIsolateError(
                f"sandboxes need {' and '.join(missing)}: apt-get install {' '.join(missing)}. {_WHERE}"
            )
        if platform.machine() not in seccomp.MACHINES:
            raise CannotIsolateError(
                f"no filter of system calls for {platform.machine()}, only for {[*seccomp.MACHINES]}"
            )
        box = await self._made(None)
        try:
            done = await box.exec("sh", "-c", _PROBE)
        finally:
            await box.close()
        if done.returncode != 0:
            raise CannotIsolateError(f"a sandbox could not be made: {done.text.strip()[-400:]}. {_WHERE}")
        self._tried = True


#: Checks inside of a sandbox: a first process of its own, one network interface (lo), and a root that cannot be
#: written.
_PROBE = (
    'test $$ -le 9 && test "$(wc -l < /proc/net/dev)" = 3 && ! test -e /etc/passwd && ! touch /x 2>/dev/null'
    ' || { echo "the probe found it open"; exit 1; }'
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalSandbox:
    """One sandbox of `Local`."""

    def __init__(self, provider: Local, holder: Process, user: dict[str, Any]) -> None:
        self._provider, self._holder, self._user = provider, holder, user
        self._running: set[Process] = set()
        self._closed = False

    async def exec(self, *command: str, stdin: bytes = b"", time_s: float | None = None) -> Done:
        limits = self._provider.limits
        return await self._exec(command, stdin, limits.time_s if time_s is None else time_s, limits.output_bytes)

    async def read(self, path: str) -> bytes:
        limits = self._provider.limits
        done = await self._exec(("cat", "--", path), b"", limits.time_s, limits.disk_bytes)
        return _good(done, f"cannot read {path}").stdout

    async def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        _good(await self.exec("sh", "-c", script, "sh", path, stdin=data), f"cannot write {path}")

    async def snapshot(self) -> Snapshot:
        limits = self._provider.limits
        packed = await self._exec(("tar", "-c", "."), b"", limits.time_s, 2 * limits.disk_bytes + (1 << 20))
        return Snapshot(_good(packed, "cannot take a snapshot").stdout)

    async def unpack(self, packed: bytes) -> None:
        _good(await self.exec("tar", "-x", stdin=packed), "cannot unpack the snapshot")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._provider.open -= 1
        for process in list(self._running):
            _kill(process)
        _kill(self._holder)
        await self._holder.wait()

    async def _exec(self, command: tuple[str, ...], stdin: bytes, time_s: float, output_bytes: int) -> Done:
        if self._closed:
            raise SandboxError("this sandbox is closed")
        began = time.monotonic()
        with _filter() as fd:
            process = await asyncio.create_subprocess_exec(
                *_argv(self._holder.pid, self._provider, fd),
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=[fd],
                limit=1 << 16,
                env={"PATH": _PATH},
                **self._user,
            )
        self._running.add(process)
        watch = _Watch(process, self._provider.limits.memory_bytes)
        out, err = bytearray(), bytearray()
        looking = asyncio.ensure_future(watch.look())
        parts = [
            asyncio.ensure_future(_feed(process, stdin)),
            asyncio.ensure_future(_take(process.stdout, out, output_bytes, watch)),
            asyncio.ensure_future(_take(process.stderr, err, output_bytes, watch)),
        ]
        try:
            async with asyncio.timeout(time_s):
                await asyncio.wait(parts)
                await process.wait()
        except TimeoutError:
            watch.end("time")
        finally:
            _kill(process)  # this also ends everything that the command has started
            looking.cancel()
            await process.wait()
            self._running.discard(process)
            await asyncio.wait(parts, timeout=_ENDED_S)
            for part in parts:
                part.cancel()
        stdout, stderr = (bytes(kept) for kept in (out, err))
        code = -9 if watch.limit else process.returncode or 0
        return Done(code, stdout, stderr, time.monotonic() - began, watch.limit)


class _Watch:
    """Ends a command that exceeds a limit, and notes which limit that was."""

    def __init__(self, process: Process, memory_bytes: int) -> None:
        self._process, self._memory_bytes = process, memory_bytes
        self.limit: Limit | None = None

    def end(self, limit: Limit) -> None:
        self.limit = self.limit or limit
        _kill(self._process)

    async def look(self) -> None:
        """Watch the memory of a command. If it cannot be read, the command is ended, too: it would have no limit."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if memory_of(self._process.pid) > self._memory_bytes:
                    break
        except Exception:
            logger.exception("cannot tell the memory of a sandbox's command, which is ended")
        self.end("memory")


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # a command need not read its input
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _take(stream: StreamReader | None, kept: bytearray, most: int, watch: _Watch) -> None:
    """Keep the first `most` bytes; if more come, end the command."""
    assert stream is not None
    while piece := await stream.read(1 << 16):
        if len(kept) + len(piece) > most:
            watch.end("output")
        kept += piece[: most - len(kept)]


def memory_of(pid: int) -> int:
    """Bytes of memory of a process and of all that it has started, without pages of files that they only map."""
    found, open_ = 0, [pid]
    while open_:
        process = Path(f"/proc/{open_.pop()}/task")
        # each thread reports the memory of its process, except threads that have ended, as the first one may have
        threads = [0]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            for task in process.iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    threads.append(_memory((task / "status").read_bytes()))
                    open_ += [int(child) for child in (task / "children").read_bytes().split()]
        found += max(threads)
    return found


def _memory(status: bytes) -> int:
    """The memory in a process's /proc/PID/status, whose first line is a name that the process chose: any bytes but an
    end of line. Pages that are only read take no memory of the process's own, except for page tables, which no limit of
    a process counts."""
    lines = [line.split() for line in status.split(b"\n") if line.startswith((b"RssAnon:", b"RssShmem:", b"VmPTE:"))]
    return sum(int(line[1]) << 10 for line in lines)


async def _holder(limits: Limits) -> tuple[Process, dict[str, Any]]:
    """Start a holder, a process that keeps an empty file system; returns it, and the user that it runs as."""
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        number = _USERS + secrets.randbelow(_USERS)
        user = {"user": number, "group": number, "extra_groups": []}
    script = _HOLD.format(size=limits.disk_bytes, nodes=max(1024, limits.disk_bytes >> 12))
    command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)
    try:
        holder = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={"PATH": _PATH}, **user
        )
    except (OSError, ValueError) as error:  # this root may not become another user
        raise CannotIsolateError(f"cannot run as user {user.get('user')}: {error}. {_WHERE}") from error
    assert holder.stdout is not None
    assert holder.stderr is not None
    ready = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STARTED_S):
                ready = await holder.stdout.readline()
    except BaseException:  # the waiting task was cancelled, as that of a late rollout: nobody else ends the holder
        _kill(holder)
        await holder.wait()
        raise
    if not ready:
        _kill(holder)
        said = (await holder.stderr.read()).decode(errors="replace").strip()
        await holder.wait()
        raise CannotIsolateError(f"a sandbox could not be made: {said}. {_WHERE}")
    return holder, user


def _argv(holder: int, provider: Local, filter_fd: int) -> list[str]:
    """The arguments that come before a command."""
    limits = provider.limits
    inside = ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if Path(folder).is_symlink():
            inside += ["--symlink", str(Path(folder).readlink()), folder]
        elif Path(folder).is_dir():
            inside += ["--ro-bind", folder, folder]
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        inside += ["--ro-bind-try", path, path]
    for path in provider.read_only:
        inside += ["--ro-bind", path, path]
    bounds = {
        "nproc": limits.processes,
        "data": limits.memory_bytes,
        "fsize": limits.disk_bytes,
        "nofile": limits.open_files,
        "cpu": math.ceil(limits.cpu_s),
        "core": 0,
        "msgqueue": 0,
        "memlock": 0,
    }
    return [
        *("nsenter", "--target", str(holder), "--user", "--mount", "--preserve-credentials", "--"),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox", "--seccomp", str(filter_fd)),
        *("--clearenv", "--setenv", "PATH", _PATH, "--setenv", "HOME", FOLDER, "--setenv", "LANG", "C.UTF-8"),
        *inside,
        # process 1 is bubblewrap's: whoever can write to its memory outlives it
        *("--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *("--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"),  # it gives zeros, but cannot be mapped
        *("--bind", "/mnt/tmp", "/dev/shm", "--remount-ro", "/dev"),
        *("--bind", "/mnt/work", FOLDER, "--bind", "/mnt/tmp", "/tmp", "--remount-ro", "/", "--chdir", FOLDER),
        *("--", "prlimit", *(f"--{name}={value}" for name, value in bounds.items()), "--"),
    ]


@contextlib.contextmanager
def _filter() -> Iterator[int]:
    """A file descriptor from which bubblewrap reads the filter."""
    reading, writing = os.pipe()
    try:
        os.write(writing, seccomp.program())
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _good(done: Done, what: str) -> Done:
    if done.returncode != 0:
        why = f"its limit of {done.limit}" if done.limit else done.stderr.decode(errors="replace").strip()[-400:]
        raise SandboxError(f"{what}: {why}")
    return done


def _free_bytes() -> int:
    """How much memory of this machine is available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
