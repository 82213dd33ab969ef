"""The trainer process (`python -m workers trainer`), from the moment that it has its config.

The server holds the other end of its link. It pulls passes and executes them until it is told to drain
(by message, or by SIGTERM after the pass in progress), then says that it leaves, snapshots its runs and exits 0. When
the server is gone it exits 1: whatever it held can be rebuilt from the journal. SIGINT is ignored, because a
terminal's Ctrl-C reaches every process of the group and the supervisor alone decides how to stop.

With a Redis in its config it works for whichever API replica leads (`scheduler.links`), one after the other with
empty hands, until SIGTERM.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
import torch

from scheduler.links.configs import TrainerConfig
from scheduler.links.messages import Drain, Leaving, Pass, PullPass
from scheduler.links.sockets import WorkerLink
from store.blobs.contract import Blobs
from workers.basics import announced, blobs_of
from workers.leave import leave
from workers.model.base.shared import base_decoder
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice, device_of
from workers.model.isolation import probe
from workers.rest import Rest
from workers.scratch import scratch
from workers.trainer.runs.held import Send, Tell
from workers.trainer.runs.residency import Residency
from workers.trainer.trainer import Trainer
from workers.trainer.watchdog import Watchdog

log = logging.getLogger("trainer")

#: How often an idle trainer checks whether it was told to stop.
IDLE_POLL_S = 0.5


class Link(Protocol):
    """The part of scheduler.links.sockets.WorkerLink that the loop uses."""

    def send(self, *messages: msgspec.Struct) -> None: ...

    def recv(self, timeout_s: float | None = None) -> Pass | Drain | None: ...


class StopFlag:
    """Set by SIGTERM; looked at between passes."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, signum: int, frame: FrameType | None) -> None:
        self.is_set = True


class Working(Protocol):
    """A trainer, of one process or of several ranks."""

    @property
    def models(self) -> Mapping[str, Decoder]: ...

    @property
    def residency(self) -> Residency: ...

    @property
    def memory_bytes(self) -> int:
        """How much memory the trainer's runs may take."""

    def execute(self, pass_: Pass, send: Send) -> None: ...

    def drain(self, send: Tell) -> None: ...


def serve(trainer: Working, link: Link, stop: StopFlag) -> None:
    """Pull and execute passes until drained. EOFError when the server is gone."""
    rest = Rest()
    while not stop.is_set:
        link.send(PullPass(sorted(trainer.models), trainer.memory_bytes))
        message = None
        while message is None and not stop.is_set:
            rest.waited()
            message = link.recv(IDLE_POLL_S)
        if isinstance(message, Pass):
            trainer.execute(message, link.send)
            rest.worked()
        elif isinstance(message, Drain):
            break
    link.send(Leaving())
    trainer.drain(link.send)


def load_models(models: Mapping[str, str], where: ModelDevice, base_dir: str, findings: Path) -> dict[str, Decoder]:
    """Decoders by name, from their folders. `findings`: the folder of the isolation probe's findings."""
    decoders: dict[str, Decoder] = {}
    for name, path in models.items():
        began = time.monotonic()
        decoders[name], how = base_decoder(Path(path), where, Path(base_dir) if base_dir else None)
        log.info("%s: %s, in %.1f s", name, how, time.monotonic() - began)
        log.info("%s: tenants are computed %s", name, probe(decoders[name], findings))
    return decoders


def main(config: TrainerConfig, server: WorkerLink) -> int:
    basics, data_dir = config.basics, Path(config.basics.data_dir)
    if config.ranks * config.nodes > 1:
        from workers.trainer.ranks.launch import launch  # imported with torchrun

        return launch(config, server)
    stop = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: leave(0))  # it has nothing to finish yet
    torch.set_num_threads(basics.threads)
    where = device_of(basics.device, basics.dtype)
    with announced(basics, "trainer"):
        models = load_models(basics.models, where, basics.base_dir, data_dir / "isolation")
    blobs = blobs_of(basics)
    signal.signal(signal.SIGTERM, stop.set)
    log.info("loaded on %s, with %d threads", where, torch.get_num_threads())
    watchdog = Watchdog()
    if not basics.redis_url:
        shutil.rmtree(data_dir / config.pages, ignore_errors=True)  # of a lost trainer, whose runs the journal rebuilds
    return serve_all(
        config, server, blobs, stop, lambda pages: Trainer(models, blobs, config.bounds, pages, watchdog.limit)
    )


def serve_all(
    config: TrainerConfig, server: WorkerLink, blobs: Blobs, stop: StopFlag, begin: Callable[[Path], Working]
) -> int:
    """Serve whoever holds the other end of the link; or, over Redis, one leader after the other, each with a trainer
    from `begin`, which is given a folder for its pages. Returns the exit code."""
    if not config.basics.redis_url:
        return 0 if work(begin(Path(config.basics.data_dir) / config.pages), server, stop) else 1
    from scheduler.links.train_link import TrainerLink  # imported with the Redis client

    while not stop.is_set:
        with scratch("paged") as pages:
            trainer = begin(pages)
            with (
                suppress(EOFError),
                closing(TrainerLink(config.basics.redis_url, blobs, lambda: stop.is_set)) as link,
            ):
                work(trainer, link, stop)
    return 0


def work(trainer: Working, link: Link, stop: StopFlag) -> bool:
    """Serve one server to its end. False if it was lost; then what the trainer holds is worthless."""
    log.info("ready: runs may take %d MiB of memory", trainer.residency.budget_bytes >> 20)
    try:
        serve(trainer, link, stop)
    except EOFError:
        log.info("the server is gone")
        return False
    finally:
        trainer.residency.close()
    return True
