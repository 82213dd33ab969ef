"""The trainer process: `python -m workers.trainer --link-fd N --data-dir DIR --model NAME=PATH ...`.

Started by a supervisor that holds the other end of the link. Pulls passes and executes them until it is told to drain
(by message, or by SIGTERM after the pass in progress), then snapshots its runs and exits 0. When the server is gone it
exits 1: whatever it held can be rebuilt from the journal. SIGINT is ignored, because a terminal's Ctrl-C reaches every
process of the group and the supervisor alone decides how to stop.

With `--redis URL` instead of the link it works for the API replica that leads (`scheduler.links`), and for each new
leader begins without runs, until SIGTERM.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
import torch

from scheduler.links.messages import Drain, Pass, PullPass
from scheduler.links.sockets import WorkerLink
from store.blobs import Blobs
from workers.leave import leave
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice, add_arguments, device_of
from workers.model.isolation import probe
from workers.model.weights import load_decoder
from workers.trainer.trainer import Trainer, TrainerSettings

#: How often an idle trainer looks whether it was told to stop.
IDLE_POLL_S = 0.5


class Link(Protocol):
    """What the loop needs of scheduler.links.sockets.WorkerLink."""

    def send(self, message: msgspec.Struct) -> None: ...

    def recv(self, timeout_s: float | None = None) -> Pass | Drain | None: ...


class StopFlag:
    """Set by SIGTERM; looked at between passes."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, signum: int, frame: FrameType | None) -> None:
        self.is_set = True


def serve(trainer: Trainer, link: Link, stop: StopFlag) -> None:
    """Pull and execute passes until drained. EOFError when the server is gone."""
    while not stop.is_set:
        link.send(PullPass(sorted(trainer.models)))
        message = None
        while message is None and not stop.is_set:
            message = link.recv(IDLE_POLL_S)
        if isinstance(message, Pass):
            trainer.execute(message, link.send)
        elif isinstance(message, Drain):
            break
    trainer.drain(link.send)


def load_models(models: Sequence[str], where: ModelDevice, findings: Path | None = None) -> dict[str, Decoder]:
    """Decoders by name from NAME=PATH pairs. `findings`: the folder of the isolation probe's findings."""
    decoders: dict[str, Decoder] = {}
    for pair in models:
        name, separator, path = pair.partition("=")
        if not (name and separator and path):
            raise SystemExit(f"--model must be NAME=PATH, got {pair!r}")
        began = time.monotonic()
        decoders[name] = load_decoder(Path(path), where.dtype, where.device)
        _log(f"loaded {name} in {time.monotonic() - began:.1f} s")
        _log(f"{name}: tenants are computed {probe(decoders[name], findings)}")
    return decoders


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    stop = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: leave(0))  # nothing to finish yet
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = TrainerSettings(args.microbatch_tokens, args.snapshot_every_tokens, args.resident_bytes, args.host_bytes)
    where = device_of(args)
    models, blobs = load_models(args.model, where, args.data_dir / "isolation"), Blobs(args.data_dir / "blobs")
    signal.signal(signal.SIGTERM, stop.set)
    _log(f"loaded on {where}, with {torch.get_num_threads()} threads")
    if args.redis is None:
        pages_dir = args.data_dir / "pages"
        shutil.rmtree(pages_dir, ignore_errors=True)  # pages of a lost trainer, which the journal rebuilds
        trainer = Trainer(models, blobs, settings, pages_dir)
        return 0 if work(trainer, WorkerLink(args.link_fd), stop) else 1
    from scheduler.links.train_link import TrainerLink  # imports the database and Redis clients

    while not stop.is_set:
        with tempfile.TemporaryDirectory(prefix="weft-pages-") as pages:
            trainer = Trainer(models, blobs, settings, Path(pages))
            with suppress(EOFError), closing(TrainerLink(args.redis, blobs, lambda: stop.is_set)) as link:
                work(trainer, link, stop)
    return 0


def work(trainer: Trainer, link: Link, stop: StopFlag) -> bool:
    """Serve one server to its end. False when it was lost; then what the trainer holds is worthless."""
    _log(f"ready: runs may take {trainer.residency.budget_bytes >> 20} MiB of memory")
    try:
        serve(trainer, link, stop)
    except EOFError:
        _log("the server is gone")
        return False
    finally:
        trainer.residency.close()
    return True


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = TrainerSettings()
    parser = argparse.ArgumentParser(prog="python -m workers.trainer", description="A Weft trainer worker.")
    link = parser.add_mutually_exclusive_group(required=True)
    link.add_argument("--link-fd", type=int, help="inherited file descriptor of the worker link")
    link.add_argument("--redis", metavar="URL", help="work for the API replicas on this Redis")
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="the service's data folder; blobs are in its blobs/"
    )
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", help="base model to serve")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's own choice")
    add_arguments(parser)
    parser.add_argument("--microbatch-tokens", type=int, default=defaults.microbatch_tokens)
    parser.add_argument("--snapshot-every-tokens", type=int, default=defaults.snapshot_every_tokens)
    parser.add_argument("--resident-bytes", type=int, default=0, help="memory for runs; 0: half of what is free")
    parser.add_argument("--host-bytes", type=int, default=0, help="with a device: host memory for runs paged out of it")
    return parser.parse_args(argv)


def _log(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main())
