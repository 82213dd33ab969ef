"""One copy of a base's weights on a device, in a process that does nothing else: the holder, and how workers reach
it.

A worker that finds no holder of its model starts one, in a session of its own; the holder reads the checkpoint and
tells everybody who connects where the weights are. A connection lasts as long as its worker. So:

- Who comes first has them loaded, who comes meanwhile waits for the same copy, who starts again reads nothing.
- A worker that dies, however, leaves its connection, and the weights to the others. `GRACE_S` after the last, or at
  once when somebody asks (`files.remove_unused`), the holder ends.
- A holder that dies ends its workers (`_watch`), for memory of a GPU is undefined without the process that has
  allocated it (`cuda_memory.py`). Whoever supervises them starts them again, and the first of them another holder.
- What cannot be shared is refused with the reason, and each loads its own: no IPC on that device, containers that do
  not see each other's processes, a checkpoint that cannot be loaded.

Socket and lock lie in this user's folder in `base_dir`, under the name of all that decides the bytes (`flat.name_of`)
and the device: another model, version of the code, dtype or device has another holder. The lock is held from before a
holder is started to its end, so there is never a second one of a name. Ranks of a trainer share nothing: each has a
part of its own (`sharded.py`), and vLLM loads its own, too.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import msgspec
import torch
from torch import Tensor

from workers.model.base.files import CannotShare, at_folder, is_at, own_folder
from workers.model.base.flat import decoder_over, layout_of, name_of
from workers.model.base.weights import copy_weights
from workers.model.card import weight_files
from workers.model.device import DTYPES, ModelDevice
from workers.model.families.read import read_config

log = logging.getLogger("base")

#: How long a holder without users goes on: a killed worker is restarted sooner.
GRACE_S = 60.0
#: How long a holder waits for memory of processes that are just ending.
MEMORY_WITHIN_S = 20.0
#: How long an ending holder may delay its successor's start.
ENDS_WITHIN_S = 60.0
#: The holder's name in `ps` and `top`.
TITLE = "weft-weights"
_PEER = struct.Struct("3i")  # pid, uid, gid
#: By type of device: the module whose memory can be shared.
MEMORY = {"cuda": "workers.model.base.cuda_memory"}
#: The holders that this process has started.
_started: list[subprocess.Popen[bytes]] = []


class Memory(Protocol):
    """The interface of a module whose memory processes can share; see `cuda_memory.py`."""

    def identity(self, device: torch.device) -> str: ...

    def environment(self) -> dict[str, str]: ...

    def room(self, size_bytes: int, device: torch.device) -> Tensor: ...

    def handle(self, whole: Tensor) -> list[Any]: ...

    def opened(self, found: list[Any], device: torch.device) -> Tensor: ...


class Here(msgspec.Struct, tag=True):
    """How to open the weights (`Memory.opened`)."""

    handle: list[Any]


class Refused(msgspec.Struct, tag=True):
    why: str


class Load(msgspec.Struct, frozen=True):
    """The weights that a holder loads: those of a model folder, in this dtype on this device. `module`: the module of
    the device's memory."""

    path: str
    dtype: str
    device: str
    module: str
    name: str

    @classmethod
    def of(cls, path: Path, where: ModelDevice, module: str) -> Load:
        """Raises UnsupportedModel."""
        layout = layout_of(read_config(path.name, path), where.dtype, where.device)
        device = _memory(module).identity(where.device)
        name = name_of(layout, [path / "config.json", *weight_files(path.name, path)], device)
        return cls(str(path), str(where.dtype).removeprefix("torch."), str(where.device), module, name)


def _memory(module: str) -> Memory:
    return cast(Memory, importlib.import_module(module))


# A worker


def held(folder: Path, load: Load) -> tuple[Tensor, str]:
    """The weights (`flat.decoder_over`), and for the log how they came. If the holder dies, this process ends. Raises
    CannotShare."""
    own = own_folder(folder)
    for _ in range(3):  # a holder may end just when we connect, or be killed while it loads
        link, started = _reach(own, load)
        try:
            link.send_bytes(load.name.encode())
            reply = msgspec.msgpack.decode(link.recv_bytes(), type=Here | Refused)
        except (EOFError, OSError):
            link.close()
            continue
        if isinstance(reply, Refused):
            link.close()
            raise CannotShare(reply.why)
        try:
            whole = _memory(load.module).opened(reply.handle, torch.device(load.device))
        except RuntimeError as error:
            link.close()
            raise CannotShare(f"this process cannot open the weights of another ({error})") from None
        threading.Thread(target=_watch, args=(link, _end), daemon=True).start()
        how = "loaded, for all workers on the device" if started else "opened, as another worker had them loaded"
        return whole, how
    raise CannotShare(f"processes that were to hold the weights of {load.path} have died three times")


def _watch(link: Connection, lost: Callable[[], None]) -> None:
    with suppress(EOFError, OSError):
        link.recv_bytes()
    lost()


def _end() -> NoReturn:
    log.error("the process that held the weights is gone, and they with it: leaving")
    os._exit(1)  # everything in this process can be rebuilt, as after any crash


def _reach(own: Path, load: Load) -> tuple[Connection, bool]:
    """A connection to the holder, and whether this call has started it."""
    until = time.monotonic() + ENDS_WITHIN_S
    with at_folder(own) as short:
        address = f"{short}/{load.name}.sock"
        while time.monotonic() < until:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                started = _start(own / f"{load.name}.lock", address, load, link)
                if not started:
                    link.close()
                    time.sleep(0.05)  # another worker is about to start it, or one is about to end
                    continue
                return Connection(link.detach()), True
            if _peer(link)[1] == os.geteuid():
                return Connection(link.detach()), False
            raise CannotShare(f"{own}/{load.name}.sock is another user's")
    raise CannotShare(f"the process that holds {own}/{load.name}.lock neither answers nor ends")


def _start(lock_path: Path, address: str, load: Load, link: socket.socket) -> bool:
    """Start a holder with `link` as its first connection, unless another process is about to."""
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # inherited by the holder, which keeps the lock
        if not is_at(lock, lock_path):
            return False
        Path(address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            os.chmod(address, 0o600)
            listener.listen()
            link.connect(address)
            what, kept = msgspec.json.encode(load).decode(), (listener.fileno(), lock)
            command = [sys.executable, "-P", "-m", __name__, str(listener.fileno()), what]
            environment = _memory(load.module).environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen(command, pass_fds=kept, env=environment, start_new_session=True)
        _started.append(process)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _peer(link: socket.socket) -> tuple[int, int]:
    """The process id at the other end (0 if it is not visible from here), and its user."""
    pid, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


# The holder


def main(argv: Sequence[str]) -> int:
    """`argv`: the descriptor of the socket, which is inherited, and a Load as JSON."""
    listener, load = socket.socket(fileno=int(argv[0])), msgspec.json.decode(argv[1], type=Load)
    logging.basicConfig(format="%(asctime)s weights %(levelname)s %(message)s", level=logging.INFO)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(TITLE)
    grace = Grace(GRACE_S)
    # at a service manager's signal it ends only once no worker is connected: they may still drain
    signal.signal(signal.SIGTERM, lambda signum, frame: grace.end())
    answer: Here | Refused
    try:
        _whole, handle = _loaded(load, _memory(load.module))  # kept alive for as long as this process lives
        answer = Here(handle)
    except Exception as error:  # each worker will meet the error again when it loads its own weights
        answer = Refused(f"{type(error).__name__}: {error}")
        log.warning("%s: not held for all: %s", load.path, answer.why)
        grace.end()
    torch.cuda.empty_cache()
    _forget_output()
    serve(listener, load.name, answer, grace)
    return 0


def _forget_output() -> None:
    """Close the inherited output: whoever reads the worker's output would otherwise wait for the end of this process,
    too."""
    with open(os.devnull, "r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)


def _loaded(load: Load, memory: Memory) -> tuple[Tensor, list[Any]]:
    """The weights and the handle that all workers open. Everything that could fail is done here, before a worker
    connects."""
    path, dtype, device = Path(load.path), DTYPES[load.dtype], torch.device(load.device)
    config, files, began = read_config(path.name, path), weight_files(path.name, path), time.monotonic()
    layout = layout_of(config, dtype, device)
    whole = _room(memory, layout.size_bytes, device)
    memory.handle(whole)  # a device that cannot share says so before anything is read
    copy_weights(decoder_over(config, dtype, whole), files)
    if Load.of(path, ModelDevice(device, dtype), load.module).name != load.name:
        raise CannotShare(f"{path} or the code has changed since the worker looked")
    log.info("%s: %d MiB held on %s, loaded in %.1f s", path, whole.nbytes >> 20, device, time.monotonic() - began)
    return whole, memory.handle(whole)


def _room(memory: Memory, size_bytes: int, device: torch.device) -> Tensor:
    until = time.monotonic() + MEMORY_WITHIN_S
    while True:
        try:
            return memory.room(size_bytes, device)
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


class Grace:
    """For how long a holder without users waits for the next one, before it ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def end(self) -> None:
        self.seconds = 0.0


def serve(listener: socket.socket, name: str, answer: Here | Refused, grace: Grace) -> None:
    """Serve until nobody has been connected for the time of grace, or somebody asks the holder to end."""
    listener.setblocking(False)
    links: list[Connection] = []
    askers: list[int] = []  # connections that asked it to end: they wait for its end, or are told that it stays
    used = time.monotonic()
    while True:
        ready = wait([listener, *links], timeout=1)
        links += _accepted(listener)  # first, so that a request to end it sees those who have just connected
        asked = False
        for link in [link for link in links if link in ready]:
            message = _received(link)
            if message == b"":
                asked = True
                askers.append(os.dup(link.fileno()))
            if not message or not _answered(link, message, name, answer):
                link.close()
                links.remove(link)
        if links:
            used = time.monotonic()
            while askers:
                os.close(askers.pop())
        elif asked or time.monotonic() - used >= grace.seconds:
            return  # the kernel closes the connections of `askers` after the memory is freed


def _accepted(listener: socket.socket) -> list[Connection]:
    """New connections, of this user only."""
    found = []
    with suppress(BlockingIOError):
        while True:
            link = listener.accept()[0]
            if _peer(link)[1] == os.geteuid():
                found.append(Connection(link.detach()))
            else:
                link.close()
    return found


def _received(link: Connection) -> bytes | None:
    """A message; None if the connection has ended."""
    try:
        return link.recv_bytes(1 << 10)
    except (EOFError, OSError):
        return None


def _answered(link: Connection, message: bytes, name: str, answer: Here | Refused) -> bool:
    """Answer a connection; returns whether it uses the weights now."""
    reply = answer if message == name.encode() else Refused("the process holds other weights")
    if isinstance(reply, Here):
        with socket.socket(fileno=os.dup(link.fileno())) as peer:
            pid = _peer(peer)[0]
        if not _sees(pid):
            why = "the process that holds the weights is in another container: they need one IPC and one PID namespace"
            reply = Refused(f"{why}, or a base_dir of their own")
    with suppress(OSError):
        link.send_bytes(msgspec.msgpack.encode(reply))
        return isinstance(reply, Here)
    return False


def _sees(pid: int) -> bool:
    """True if a process is in this one's IPC namespace, and visible in its PID namespace, as shared memory needs."""
    try:
        return pid > 0 and os.readlink(f"/proc/{pid}/ns/ipc") == os.readlink("/proc/self/ns/ipc")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
