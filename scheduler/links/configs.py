"""The first message to a worker over its link: its config, with everything that an operator can set for it.

The server makes these of its settings, which are checked there (`api.server.workers.worker_programs`). A worker reads
no settings of its own and takes no other arguments than the link.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.links.messages import FORM

#: The exit code of a worker whose message format differs from the server's.
OF_ANOTHER_VERSION = 79


class Basics(msgspec.Struct, frozen=True):
    """What workers of both kinds are told. `models` are the folders of the base models by name. `device` and `dtype`
    are what the operator wrote, `auto` too: the worker knows its machine. With `redis_url` it works for the API
    replicas on that Redis instead of whoever holds the other end of its link. Weights of the bases are shared with the
    other workers of the host in `base_dir` ("": each holds its own). Blobs are in `data_dir`, or at `blob_url`; then up
    to `blob_cache_bytes` of what was read are kept in `data_dir`. `role` (trainer, generator-2, ...) is its name in the
    log, whose form and level are given, too (`store.logs`). `form` identifies the server's message format."""

    data_dir: str
    models: dict[str, str]
    threads: int = 1
    device: str = "auto"
    dtype: str = "auto"
    durable: bool = False
    redis_url: str = ""
    base_dir: str = ""
    blob_url: str = ""
    blob_cache_bytes: int = 0
    role: str = ""
    log_format: str = "text"
    log_level: str = "info"
    form: str = FORM


class TrainerBounds(msgspec.Struct, frozen=True):
    """`microbatch_tokens` caps what is computed at once: memory grows with it, and beyond some 2k tokens a CPU gets
    slower. After `snapshot_every_tokens` trained tokens a run's state is saved, at an optimizer step or at the end of
    a pass, which bounds how much a lost trainer has to replay. The states of runs take up to `resident_bytes` of the
    memory that computes, and, where that is a device's, `host_bytes` of the host's; 0: half of what is free at the
    start, divided by the `trainers` that are on this machine. An uploaded loss may take `loss_limit_s` for each
    thousand of what it costs at most on the data at hand."""

    microbatch_tokens: int = 2048
    snapshot_every_tokens: int = 65536
    resident_bytes: int = 0
    host_bytes: int = 0
    loss_limit_s: float = 10.0
    trainers: int = 1


class TrainerConfig(msgspec.Struct, frozen=True, tag=True):
    """`pages` is the folder, of its own, for the runs of a trainer without a Redis that are in files. `ranks` processes
    on each of `nodes` machines, which meet at `rendezvous` (HOST:PORT of one of them), are one trainer and share the
    base: over all of them, or with `shard` "node" over those of a node; with "experts" they have its experts in equal
    shares, and the rest whole."""

    basics: Basics
    bounds: TrainerBounds = TrainerBounds()
    pages: str = "pages"
    ranks: int = 1
    nodes: int = 1
    rendezvous: str = ""
    shard: str = "all"


class TorchConfig(msgspec.Struct, frozen=True, tag=True):
    """Our own engine. `kv_tokens` are kept of all running sequences (0: as many as full slots take), and up to
    `prefill_tokens` of prompts are computed between two decode steps. Adapters take `adapter_bytes` at most, in use or
    kept, and prompts that are kept `prefix_bytes`, of each base model. `packed`: with a second copy of the weights,
    which makes products faster on a CPU. A step tries up to `lookup` tokens more of each sequence."""

    kv_tokens: int = 0
    prefill_tokens: int = 2048
    adapter_bytes: int = 2 << 30
    prefix_bytes: int = 512 << 20
    packed: bool = True
    lookup: int = 0


class VllmConfig(msgspec.Struct, frozen=True, tag=True):
    """vLLM: the command `program`, which the worker starts, or one that is there already at `url`. Adapters are
    written to `folder`, which is emptied; to a temporary one without. It has room for `max_adapters` in one batch, of
    `max_rank` at most, and on a CPU `kv_bytes` for keys and values. `options` are vLLM's own, `gpus` the numbers of
    those of each model's vLLM. `lossy_adapters`: serve adapters though options make its numbers others than the
    trainer's."""

    folder: str
    program: str = ""
    url: str = ""
    max_adapters: int = 16
    max_rank: int = 64
    kv_bytes: int = 1 << 30
    options: dict[str, Any] = {}
    gpus: dict[str, list[int]] = {}
    lossy_adapters: bool = False


class GeneratorConfig(msgspec.Struct, frozen=True, tag=True):
    """`slots` sequences are decoded at the same time, each of at most `context_tokens` (less where the model's own
    context is shorter)."""

    basics: Basics
    slots: int = 32
    context_tokens: int = 8192
    engine: TorchConfig | VllmConfig = TorchConfig()


WorkerConfig = TrainerConfig | GeneratorConfig
