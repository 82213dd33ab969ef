"""The forwards and backwards of one stage: planned into parts, packed, computed, and recovered when one raises."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator

from scheduler.messages import TrainOp
from workers.model.decoder import Decoder
from workers.trainer.microbatch import run_microbatch
from workers.trainer.packing import cut, pack
from workers.trainer.progress import Part, Progress
from workers.trainer.state import RunState


class Computing:
    """Collects slices with `plan`, computes them with `run`. `cap_tokens` bounds a microbatch."""

    def __init__(self, cap_tokens: int) -> None:
        self._cap_tokens = cap_tokens
        self._parts: list[Part] = []
        self._planned: list[Progress] = []

    def plan(self, progress: Progress, op: TrainOp) -> None:
        """Add one slice of an operation. A final slice 0:0 is the whole operation."""
        lengths = [len(datum.tokens) for datum in progress.batch.data]
        stop = op.stop if op.stop or not op.final else len(lengths)
        progress.ended = op.final
        if not 0 <= op.start <= stop <= len(lengths):
            progress.fail(f"slice {op.start}:{stop} of operation {op.op_id} is not within its {len(lengths)} data")
            stop = op.start
        for first, last in cut(lengths, op.start, stop, self._cap_tokens):
            self._parts.append(Part(progress, first, last, sum(lengths[first:last])))
            progress.waiting += 1
        if progress not in self._planned:
            self._planned.append(progress)

    def run(self, decoder_of: Callable[[RunState], Decoder]) -> Iterator[Progress]:
        """Compute everything, giving out each operation as soon as it is complete (its `failure` set if it failed).

        Operations that need gradients and those that do not are packed apart, so that a forward pays no backward."""
        yield from self._complete()
        for trains in (True, False):
            parts = [part for part in self._parts if part.trains is trains]
            for batch in pack(parts, lambda part: part.tokens, self._cap_tokens):
                # An operation that has failed needs no more compute; its place stays empty, nobody else moves.
                alive = [part for part in batch if part.progress.failure is None]
                if alive:
                    self._attempt(decoder_of(alive[0].progress.run), alive, trains)
                for part in batch:
                    part.progress.waiting -= 1
                yield from self._complete()

    def _complete(self) -> Iterator[Progress]:
        done = [progress for progress in self._planned if progress.complete]
        self._planned = [progress for progress in self._planned if not progress.complete]
        yield from done

    def _attempt(self, decoder: Decoder, parts: list[Part], trains: bool) -> None:
        """Compute a microbatch; if it raises, compute its operations one by one to find the guilty one. An operation
        that is repeated starts from its first part, because its arena may hold a part of a gradient."""
        try:
            run_microbatch(decoder, parts, trains=trains)
            return
        except Exception:
            traceback.print_exc(file=sys.stderr)
        for progress in dict.fromkeys(part.progress for part in parts):
            again = progress.restart() + [part for part in parts if part.progress is progress]
            try:
                for part in again:
                    run_microbatch(decoder, [part], trains=trains)
            except Exception as error:
                progress.fail(f"{type(error).__name__}: {error}")
