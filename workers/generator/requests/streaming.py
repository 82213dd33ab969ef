"""What streamed samples have drawn, told while they run: a client that reads along may stop one early."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Protocol

import msgspec

from scheduler.links.messages import Drawn, DrawnTokens
from workers.generator.engine import Engine, SoFar

#: Pause between two messages: a reader waits this much longer for a token, at most.
TELL_S = 0.03


class Link(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class Streams:
    """Streamed samples of a generator that have not ended. `tell` sends the new tokens of all of them."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._told: dict[str, tuple[Engine, list[int]]] = {}  # by sequence: how many tokens were told
        self._last = 0.0

    def open(self, op_id: str, engine: Engine, num_samples: int) -> None:
        self._told[op_id] = (engine, [0] * num_samples)

    def close(self, op_id: str) -> None:
        """Stop streaming a sample that has ended: its `Done` contains everything."""
        self._told.pop(op_id, None)

    def tell(self) -> None:
        if not self._told or self._clock() - self._last < TELL_S:
            return
        self._last = self._clock()
        for op_id, (engine, told) in self._told.items():
            parts = []
            for sample, sequence in enumerate(engine.so_far(op_id)):
                if len(sequence.tokens) > told[sample]:
                    parts.append(_since(sequence, sample, told[sample]))
                    told[sample] = len(sequence.tokens)
            if parts:
                self._link.send(Drawn(op_id, parts))


def _since(sequence: SoFar, sample: int, start: int) -> DrawnTokens:
    versions = list(chain.from_iterable(repeat(version, length) for version, length in sequence.policy))
    return DrawnTokens(
        sample,
        start,
        list(sequence.tokens[start:]),
        list(sequence.logprobs[start:]),
        versions[start:],
        list(sequence.tops[start:]),
    )
