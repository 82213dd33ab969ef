"""A trainer of several ranks is a torchrun: this process becomes its agent, and its children are the ranks.

The agent watches them: when one dies it ends the others and exits, and whoever supervises this process starts it again;
what the ranks held is rebuilt from the journal. The link to the server and the config go to the children over a socket
of this process's, because torchrun's children inherit no descriptors: the link to rank 0 alone, so that the server sees
at once when that is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import msgspec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from scheduler.links.configs import TrainerConfig
from scheduler.links.sockets import WorkerLink
from workers.leave import leave
from workers.scratch import scratch

log = logging.getLogger("trainer")

#: The largest config, in bytes.
CONFIG_BYTES = 1 << 20


def launch(config: TrainerConfig, server: WorkerLink) -> int:
    """Start this node's ranks and return how they ended: 0 if they were told to stop."""
    leader: list[int] = []  # the process of rank 0
    signal.signal(signal.SIGTERM, lambda signum, frame: _stop(leader))
    with scratch("ranks") as folder:
        door = folder / "door"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(door))
        listening.listen(config.ranks)
        handing = threading.Thread(target=_hand_out, args=(listening, config, server, leader), daemon=True)
        handing.start()
        program = [sys.executable, "-P", "-m", "workers.trainer.ranks.process", str(door), str(os.getpid())]
        try:
            run(parse_args([*_places(config), f"--log-dir={folder}", "--no-python", *program]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            for rank, failure in sorted(error.failures.items()):
                ended = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
                log.error("rank %d is lost (%s)", rank, ended)
            return 1
    return 0


def _places(config: TrainerConfig) -> list[str]:
    """The arguments of torchrun. It restarts nothing itself: whoever supervises this process does."""
    places = [f"--nproc-per-node={config.ranks}", "--max-restarts=0", "--signals-to-handle=SIGHUP"]
    if config.nodes == 1:
        return [*places, "--standalone"]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={config.rendezvous}", "--rdzv-id=weft-trainer"]
    return [*places, f"--nnodes={config.nodes}", *meet]


def _hand_out(listening: socket.socket, config: TrainerConfig, server: WorkerLink, leader: list[int]) -> None:
    word = msgspec.msgpack.encode(config)
    for _ in range(config.ranks):
        with listening.accept()[0] as child:
            rank, pid = map(int, child.recv(64).split())
            if rank:
                socket.send_fds(child, [word], [])
                continue
            socket.send_fds(child, [word], [server.fileno()])
            server.close()
            leader.append(pid)


def _stop(leader: list[int]) -> None:
    """SIGTERM: rank 0 finishes its pass and makes all ranks leave. Before rank 0 exists nothing has begun."""
    if not leader:
        leave(0)
    with suppress(ProcessLookupError):
        os.kill(leader[0], signal.SIGTERM)


def handed(door: str) -> tuple[TrainerConfig, int | None]:
    """In a rank: its config, and on rank 0 the descriptor of the link."""
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(door)
        parent.sendall(f"{os.environ['RANK']} {os.getpid()}".encode())
        word, fds, _, _ = socket.recv_fds(parent, CONFIG_BYTES, 1)
    return msgspec.msgpack.decode(word, type=TrainerConfig), fds[0] if fds else None
