"""From slices of operations to microbatches.

Rule: a slice is cut into parts at points that depend on its own data alone, each part is one LoRA group, and parts keep
their order. So a run's sums have the same terms in the same order whichever runs share the microbatches, and nothing is
padded. Example, cap 8: slices A (data of 3, 3, 4 tokens) and B (5) give parts A1 (3, 3), A2 (4), B1 (5) and
microbatches [A1], [A2] [B1] as 6, 4, 5 tokens: A2 + B1 would be 9.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from scheduler.links.messages import OpKind, TrainOp

PartT = TypeVar("PartT")


def cut(lengths: Sequence[int], start: int, stop: int, cap_tokens: int) -> list[tuple[int, int]]:
    """Cut data start:stop, whose token counts are in `lengths`, into runs of at most `cap_tokens`. A datum is never
    cut: one longer than the cap is a run of its own."""
    parts: list[tuple[int, int]] = []
    first, tokens = start, 0
    for index in range(start, stop):
        if tokens and tokens + lengths[index] > cap_tokens:
            parts.append((first, index))
            first, tokens = index, 0
        tokens += lengths[index]
    if first < stop:
        parts.append((first, stop))
    return parts


def pack(parts: Sequence[PartT], tokens_of: Callable[[PartT], int], cap_tokens: int) -> list[list[PartT]]:
    """Microbatches of at most `cap_tokens` (or of one part that is larger), in the order of the parts."""
    batches: list[list[PartT]] = []
    room = 0
    for part in parts:
        tokens = tokens_of(part)
        if not batches or tokens > room:
            batches.append([])
            room = cap_tokens
        batches[-1].append(part)
        room -= tokens
    return batches


def leading(queues: dict[str, deque[TrainOp]], kinds: tuple[OpKind, ...], at_most: int = sys.maxsize) -> list[TrainOp]:
    """Take operations of these kinds from the head of every run's queue."""
    taken: list[TrainOp] = []
    for queue in queues.values():
        count = 0
        while queue and queue[0].kind in kinds and count < at_most:
            taken.append(queue.popleft())
            count += 1
    return taken
