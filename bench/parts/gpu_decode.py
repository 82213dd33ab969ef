"""What `bench/gpu.py --decode` measures: one decode step of many sequences, each with an adapter of its own.

For every number of rows the variants are interleaved, each launched piece by piece and replayed from a CUDA graph:

- base: no adapters, the limit; one adapter: the same for all rows; adapters: as many as rows, or as fit (`distinct`).

All sequences are of one length, in pages scattered over the cache. `gb_per_s` counts what a step must read of the base
and of the cache, with experts chosen evenly; adapters and activations come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.parts.gpu_measure import distinct_adapters, seconds_of, top_kernels
from workers.generator.cache.kv_cache import KVCache, pages_of
from workers.generator.gpu.capture import CudaGraphs, Repeated
from workers.generator.gpu.step import Step
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu.segments import forms

SEED = 0


def bytes_read(config: DecoderConfig, rows: int, length: int, itemsize: int) -> float:
    """Bytes that one step reads of frozen weights and cache. A row of a mixture layer reads k of its E experts; of all
    rows' choices E (1 - (1 - k / E)^rows) are different."""
    d, width = config.hidden_size, config.intermediate_size
    attn = d * (2 * config.q_size + 2 * config.kv_size)
    numel = float(config.vocab_size * d)
    for layer in range(config.num_layers):
        numel += attn + 2 * rows * length * config.kv_size
        if config.is_moe(layer):
            experts = config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** rows)
            numel += config.num_experts * d + experts * 3 * d * config.moe_intermediate_size
        else:
            numel += 3 * d * width
    return numel * itemsize


@dataclass(frozen=True)
class Batch:
    """Sequences of `length` positions each, the last of which is for the newest token."""

    decoder: Decoder
    cache: KVCache
    rows: int
    length: int

    @classmethod
    def of(cls, decoder: Decoder, rows: int, length: int) -> Batch:
        config = decoder.config
        cache = KVCache(
            layers=config.num_layers,
            pages=rows * pages_of(length),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        return cls(decoder, cache, rows, length)

    def step(self, adapters: Sequence[Adapter]) -> Step:
        """One decode step; rows use the adapters in turn."""
        width, random = pages_of(self.length), np.random.default_rng(SEED)
        of_rows = [adapters[row % len(adapters)] if adapters else None for row in range(self.rows)]
        step = Step(self.decoder, self.cache, rows=self.rows, width=width, forms=forms(of_rows))
        step.load(of_rows)
        tokens = random.integers(0, self.decoder.config.vocab_size, self.rows).tolist()
        table_RW = random.permutation(self.cache.pages).astype(np.int32).reshape(self.rows, width)
        step.feed(tokens, [self.length - 1] * self.rows, table_RW[None])
        return step


def variants(batch: Batch, adapters: Sequence[Adapter], *, graphs: bool) -> dict[str, Callable[[], Any]]:
    """The variants, each a function of one step; with `graphs` also the replayed ones, already captured."""
    found: dict[str, Callable[[], Any]] = {}
    for name, own in (("base", []), ("one adapter", adapters[:1]), ("adapters", adapters[: batch.rows])):
        step = batch.step(own)
        found[f"{name}, pieces"] = step.compute
        if graphs:
            found[f"{name}, replayed"] = replayed = Repeated(step.compute, CudaGraphs[Any]())
            replayed(), replayed()
    return found


def times(work: Callable[[], Any], steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            work()

    return run


def report(batch: Batch, seconds: dict[str, float], steps: int, distinct: int) -> list[dict[str, Any]]:
    """Figures from the `seconds` of each variant's steps; `limit` is its speed as a share of the base's."""
    config, itemsize = batch.decoder.config, batch.decoder.dtype.itemsize
    read = bytes_read(config, batch.rows, batch.length, itemsize)
    return [
        {
            "variant": name,
            "rows": batch.rows,
            "distinct": {"base": 0, "one adapter": 1}.get(name.partition(",")[0], distinct),
            "ms_per_step": round(1e3 * taken / steps, 4),
            "tokens_per_s": round(batch.rows * steps / taken, 1),
            "gb_per_s": round(read * steps / taken / 1e9, 1),
            "limit": round(seconds[f"base,{name.partition(',')[2]}"] / taken, 4),
        }
        for name, taken in seconds.items()
    ]


@torch.inference_mode()
def run_rank(
    decoder: Decoder, rank: int, numbers: Sequence[int], length: int, *, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure all numbers of rows, with adapters of one rank."""
    shape = AdapterShape(decoder.config, rank)
    free = torch.cuda.mem_get_info(decoder.device)[0]
    distinct = distinct_adapters(max(numbers), 4 * shape.numel // 2, free)  # without gradients
    adapters = [Adapter.init(shape, seed, scale=2.0, device=decoder.device) for seed in range(distinct)]
    for adapter in adapters:
        adapter.flat.normal_(0.0, 0.02)
    found = []
    for rows in numbers:
        batch = Batch.of(decoder, rows, length)
        works = variants(batch, adapters, graphs=True)
        each = {name: times(work, steps) for name, work in works.items()}
        seconds = seconds_of(each, rounds, torch.cuda.synchronize)
        for row in report(batch, seconds, steps, min(rows, distinct)):
            kernels = top_kernels(works[row["variant"]])
            found.append(row | {"rank": rank, "length": length, "kernels": kernels})
            print({"rank": rank, **row}, flush=True)
    return found
