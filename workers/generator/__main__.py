"""The generator process: `python -m workers.generator --link-fd N --data-dir DIR --model NAME=PATH ...`.

Started by a supervisor that holds the other end of the link. It generates until it is told to drain (by message or by
SIGTERM), finishes what it has and exits 0. When the server is gone it exits 1: whatever it held is still in the
journal and will be sampled again. SIGINT is ignored, because a terminal's Ctrl-C reaches every process of the group
and the supervisor alone decides how to stop.

With `--redis URL` instead of the link it leases samples from the queue that API replicas share (`scheduler.links`),
until SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from scheduler.links.sockets import WorkerLink
from store.blobs import Blobs
from workers.generator.stop import text_decoder
from workers.generator.torch_engine import (
    DEFAULT_ADAPTER_BYTES,
    DEFAULT_PREFILL_TOKENS,
    DEFAULT_PREFIX_BYTES,
    TorchEngine,
)
from workers.generator.vllm import process as vllm
from workers.generator.worker import Generator
from workers.leave import leave
from workers.model.card import read_card
from workers.model.device import ModelDevice, add_arguments, device_of
from workers.model.isolation import probe
from workers.model.weights import load_decoder

if TYPE_CHECKING:
    from scheduler.links.sample_link import SampleLink
    from workers.generator.vllm.engine import VllmEngine

log = logging.getLogger("generator")

#: The longest sequence a slot holds, unless the model's own context is shorter.
DEFAULT_CONTEXT = 8192


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.engine == "torch":  # nothing to finish yet, and no vLLM to stop
        signal.signal(signal.SIGTERM, lambda signum, frame: leave(0))
    if args.threads:
        torch.set_num_threads(args.threads)
    where, blobs = device_of(args), Blobs(args.data_dir / "blobs")
    engines = {name: _engine(name, path, args, where) for name, path in args.model}
    shared = _shared(args.redis, blobs) if args.redis is not None else None
    generator = Generator(engines, blobs, shared or WorkerLink(args.link_fd), slots=args.slots)

    def drain(signum: int, frame: FrameType | None) -> None:
        generator.drain()
        if shared is not None:
            shared.drain()

    signal.signal(signal.SIGTERM, drain)
    log.info("ready on %s, with %d slots and %d threads", where, args.slots, torch.get_num_threads())
    try:
        generator.serve()
    except EOFError:
        log.info("the server is gone")
        return 1
    finally:
        for engine in engines.values():
            engine.close()
    if shared is not None:
        shared.close()
    return 0


def _shared(url: str, blobs: Blobs) -> SampleLink:
    """The link to the shared queue; imported here, with the Redis client that it needs."""
    from scheduler.links.sample_link import SampleLink

    return SampleLink(url, blobs)


def _engine(name: str, path: Path, args: argparse.Namespace, where: ModelDevice) -> TorchEngine | VllmEngine:
    if args.engine == "vllm":
        return vllm.vllm_engine(name, path, args, where)
    began = time.monotonic()
    card = read_card(name, path)
    decoder = load_decoder(path, where.dtype, where.device)
    log.info("%s: tenants are computed %s", name, probe(decoder, args.data_dir / "isolation"))
    engine = TorchEngine(
        decoder,
        card.eos_token_ids,
        slots=args.slots,
        context=min(args.context, card.context_length),
        kv_tokens=args.kv_tokens or None,
        prefill_tokens=args.prefill_tokens,
        adapter_bytes=args.adapter_bytes,
        prefix_bytes=args.prefix_bytes,
        decode_text=text_decoder(path),
    )
    log.info("loaded %s in %.1f s", name, time.monotonic() - began)
    return engine


def _model(pair: str) -> tuple[str, Path]:
    name, separator, path = pair.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {pair!r}")
    return name, Path(path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.generator", description="A Weft generator worker.")
    link = parser.add_mutually_exclusive_group(required=True)
    link.add_argument("--link-fd", type=int, help="inherited file descriptor of the worker link")
    link.add_argument("--redis", metavar="URL", help="work for the API replicas on this Redis")
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="the service's data folder; blobs are in its blobs/"
    )
    parser.add_argument("--model", type=_model, action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's own choice")
    add_arguments(parser)
    vllm.add_arguments(parser)
    parser.add_argument("--slots", type=int, default=32, help="sequences that are decoded at the same time")
    parser.add_argument("--context", type=int, default=DEFAULT_CONTEXT, help="most tokens of a sequence")
    parser.add_argument("--kv-tokens", type=int, default=0, help="of all sequences; 0: as many as full slots take")
    parser.add_argument("--prefill-tokens", type=int, default=DEFAULT_PREFILL_TOKENS, help="prompt tokens per step")
    parser.add_argument("--adapter-bytes", type=int, default=DEFAULT_ADAPTER_BYTES, help="adapters kept in memory")
    parser.add_argument("--prefix-bytes", type=int, default=DEFAULT_PREFIX_BYTES, help="prompts kept; 0 keeps none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
