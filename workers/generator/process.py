"""The generator process (`python -m workers generator`), from the moment that it has its config.

The server holds the other end of its link. It generates until it is told to drain (by message or by
SIGTERM), finishes what it has and exits 0. When the server is gone it exits 1: whatever it held is still in the
journal and will be sampled again. SIGINT is ignored, because a terminal's Ctrl-C reaches every process of the group
and the supervisor alone decides how to stop.

With a Redis in its config it leases samples from the queue that API replicas share (`scheduler.links`), until SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from scheduler.links.configs import GeneratorConfig, TorchConfig
from scheduler.links.sockets import WorkerLink
from store.blobs.contract import Blobs
from workers.basics import announced, blobs_of
from workers.generator.tokens.stop import text_decoder
from workers.generator.torch_engine import TorchEngine
from workers.generator.vllm.process import vllm_engine
from workers.generator.worker import Generator
from workers.leave import leave
from workers.model.base.shared import base_decoder
from workers.model.card import read_card
from workers.model.device import ModelDevice, device_of
from workers.model.isolation import probe

if TYPE_CHECKING:
    from scheduler.links.sample_link import SampleLink
    from workers.generator.vllm.engine import VllmEngine

log = logging.getLogger("generator")


def main(config: GeneratorConfig, server: WorkerLink) -> int:
    basics = config.basics
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(config.engine, TorchConfig):  # it has nothing to finish yet, and no vLLM to stop
        signal.signal(signal.SIGTERM, lambda signum, frame: leave(0))
    torch.set_num_threads(basics.threads)
    where = device_of(basics.device, basics.dtype)
    blobs = blobs_of(basics)
    with announced(basics, "generator"):
        engines = {name: _engine(name, Path(path), config, where) for name, path in basics.models.items()}
    shared = _shared(basics.redis_url, blobs) if basics.redis_url else None
    generator = Generator(engines, blobs, shared or server, slots=config.slots)

    def drain(signum: int, frame: FrameType | None) -> None:
        generator.drain()
        if shared is not None:
            shared.drain()

    signal.signal(signal.SIGTERM, drain)
    log.info("ready on %s, with %d slots and %d threads", where, config.slots, torch.get_num_threads())
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
    """The link over Redis; imported here, with the Redis client."""
    from scheduler.links.sample_link import SampleLink

    return SampleLink(url, blobs)


def _engine(name: str, path: Path, config: GeneratorConfig, where: ModelDevice) -> TorchEngine | VllmEngine:
    card, kind = read_card(name, path), config.engine
    context = min(config.context_tokens, card.context_length)
    if not isinstance(kind, TorchConfig):
        return vllm_engine(card, kind, where, context=context, slots=config.slots, threads=config.basics.threads)
    began = time.monotonic()
    base_dir = config.basics.base_dir
    decoder, how = base_decoder(path, where, Path(base_dir) if base_dir else None)
    log.info("%s: tenants are computed %s", name, probe(decoder, Path(config.basics.data_dir, "isolation")))
    engine = TorchEngine(
        decoder,
        card.eos_token_ids,
        slots=config.slots,
        context=context,
        kv_tokens=kind.kv_tokens or None,
        prefill_tokens=kind.prefill_tokens,
        adapter_bytes=kind.adapter_bytes,
        prefix_bytes=kind.prefix_bytes,
        packed=kind.packed,
        lookup=kind.lookup,
        decode_text=text_decoder(path),
    )
    log.info("%s: %s, in %.1f s", name, how, time.monotonic() - began)
    if kind.lookup and decoder.config.recurrence is not None:
        log.info("%s: without lookup, since states of recurrent layers cannot be taken back", name)
    return engine
