"""Machines with little memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from workers.trainer import computing
from workers.trainer.microbatch import run_microbatch
from workers.trainer.runs import arena


@contextmanager
def little_memory(most_tokens: int, states_bytes: int) -> Iterator[Counter[str]]:
    """Computing more than `most_tokens` at once (0: no limit) runs out of memory when the gradient is half computed, so
    that all of it is wrong. More than `states_bytes` for the states of runs (0: no limit) runs out of memory, too."""
    counts: Counter[str] = Counter()
    make, take = arena.Arena, arena.Arenas.take
    taking: list[arena.Arenas] = []

    def taken(self: arena.Arenas, kind: arena.ArenaKind) -> arena.Arena:
        taking[:] = [self]
        return take(self, kind)

    def made(kind: arena.ArenaKind, device: torch.device) -> arena.Arena:
        if states_bytes and taking[0].size_bytes + kind.size_bytes > states_bytes:
            counts["no run"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return make(kind, device)

    def run(decoder: Any, parts: Any, *, trains: bool) -> None:
        if most_tokens and len(parts) > 1 and sum(part.tokens for part in parts) > most_tokens:
            counts["refused"] += 1
            for part in parts:
                if part.progress.grad is not None:
                    part.progress.grad.flat.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        run_microbatch(decoder, parts, trains=trains)

    with (
        mock.patch.object(computing, "run_microbatch", run),
        mock.patch.object(arena, "Arena", made),
        mock.patch.object(arena.Arenas, "take", taken),
    ):
        yield counts


@contextmanager
def few_guests(most: int) -> Iterator[None]:
    """Memory runs out for one in every so many parts that are to be computed for another rank (0: for none)."""
    of_guest, made = arena.Arena.of_guest, 0

    def arena_of(kind: Any, weights: Any, **how: bool) -> arena.Arena:
        nonlocal made
        made += 1
        if most and made % most == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return of_guest(kind, weights, **how)

    with mock.patch.object(arena.Arena, "of_guest", arena_of):
        yield
