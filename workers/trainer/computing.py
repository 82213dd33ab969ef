"""The forwards and backwards of one stage: cut into parts, packed, computed, and recovered when one raises."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from scheduler.links.messages import TrainOp
from workers.model.decoder import Decoder
from workers.model.memory import is_out_of_memory, with_room
from workers.trainer.failures import too_large
from workers.trainer.microbatch import run_microbatch
from workers.trainer.packing import cut, pack
from workers.trainer.progress import Part, Progress
from workers.trainer.runs.state import RunState

log = logging.getLogger(__name__)


class Bring(Protocol):
    """Returns once all these runs are in memory."""

    def __call__(self, *runs: RunState) -> None: ...


class Ready(Protocol):
    """Brings the run of an operation into memory, with a gradient if the operation trains. False if that is not
    possible: the operation is then left out."""

    def __call__(self, progress: Progress) -> bool: ...


class Together(Protocol):
    """The other ranks of a trainer, as computing sees them. All ranks make each step at the same time."""

    def share(self, parts: Sequence[Part], bring: Bring) -> list[Part]:
        """The parts that this rank computes, of its own (a part of `parts`) and of other ranks' runs."""

    def begin(self, trains: bool) -> None:
        """Return when all ranks make a step of this kind."""

    def end(self, trains: bool) -> None:
        """Finish the step together with the other ranks, even if this rank's work in it failed."""

    def collect(self, ready: Ready) -> tuple[list[Part], list[Part]]:
        """The results of this rank's parts on other ranks: they are added in their order. Returns the `parts` that were
        computed there, and those that came back because a helper had no memory for them or an earlier one; this rank
        has to compute these."""

    def give_way(self) -> bool:
        """Free the memory of what this rank computes for others. Returns whether there was any."""


class Others(Together, Protocol):
    """The other ranks of this trainer (workers/trainer/ranks), each of which executes its own part of the same pass."""

    def wait(self) -> None:
        """Return once all ranks are ready for the next work, or have nothing more to do."""

    def attend(self, work: Callable[[], object]) -> None:
        """This rank has done its part. Take part in the other ranks' steps until they have, too: `work` computes what
        they hand out."""


class Alone:
    """A trainer without other ranks."""

    def share(self, parts: Sequence[Part], bring: Bring) -> list[Part]:
        return list(parts)

    def begin(self, trains: bool) -> None: ...

    def end(self, trains: bool) -> None: ...

    def collect(self, ready: Ready) -> tuple[list[Part], list[Part]]:
        return [], []

    def give_way(self) -> bool:
        return False


class Computing:
    """Collects slices with `plan`, computes them with `run`. `cap_tokens` bounds a part, and a microbatch at first.

    `bring` brings runs into memory together, or raises OSError when there is none for them. `left_out` gives up an
    operation whose run does not even fit alone. `relieve` frees memory after an allocation has failed."""

    def __init__(
        self,
        cap_tokens: int,
        bring: Bring,
        relieve: Callable[[], None],
        left_out: Callable[[Progress, OSError], None],
        together: Together | None = None,
    ) -> None:
        self._cap_tokens = self._room_tokens = cap_tokens
        self._bring, self._relieve, self._left_out, self._together = bring, relieve, left_out, together or Alone()
        self._parts: list[Part] = []
        self._planned: list[Progress] = []

    def plan(self, progress: Progress, op: TrainOp) -> None:
        """Add one slice of an operation. A final slice 0:0 means the whole operation."""
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

        Forwards are packed apart from forward_backwards, so that they cost no backward, and go first, being shorter."""
        yield from self._complete()
        yield from self._here(self._together.share(self._parts, self._bring), decoder_of)
        came, back = self._together.collect(self._ready)
        for part in came:
            part.progress.waiting -= 1
        yield from self._complete()
        yield from self._here(back, decoder_of)

    def _here(self, parts: list[Part], decoder_of: Callable[[RunState], Decoder]) -> Iterator[Progress]:
        """Compute these parts on this rank."""
        for trains in (False, True):
            waiting = deque(self._pack([part for part in parts if part.trains is trains]))
            while waiting:
                batch, room_tokens = waiting.popleft(), self._room_tokens
                for some in self._brought(_alive(batch)):
                    self._attempt(decoder_of(some[0].progress.run), some, trains)
                for part in batch:
                    part.progress.waiting -= 1
                yield from self._complete()
                if self._room_tokens < room_tokens:
                    waiting = deque(self._pack([part for batch in waiting for part in batch]))

    def _ready(self, progress: Progress) -> bool:
        try:
            self._bring(progress.run)
            with_room(lambda: progress.grad, self._relieve)
        except OSError as error:
            self._left_out(progress, error)
            return False
        return True

    def _brought(self, parts: list[Part]) -> Iterator[list[Part]]:
        """These parts, in groups whose runs fit in memory together: all at once, if there is room."""
        runs = list(dict.fromkeys(part.progress.run for part in parts))
        try:
            self._bring(*runs)
        except OSError as error:
            if len(runs) == 1:
                self._left_out(parts[0].progress, error)
                return
        else:
            if parts:
                yield parts
            return
        for half in (runs[: len(runs) // 2], runs[len(runs) // 2 :]):
            yield from self._brought([part for part in parts if part.progress.run in half])

    def _pack(self, parts: list[Part]) -> list[list[Part]]:
        return pack(parts, lambda part: part.tokens, self._room_tokens)

    def _complete(self) -> Iterator[Progress]:
        """Operations of one run that train end in their order, wherever they are computed: in it their gradients are
        added up, and a run remembers the last that it holds."""
        done, open_runs = list[Progress](), set[int]()
        for progress in self._planned:
            if progress.complete and not (progress.trains and id(progress.run) in open_runs):
                done.append(progress)
            elif progress.trains and progress.waiting:
                open_runs.add(id(progress.run))
        self._planned = [progress for progress in self._planned if progress not in done]
        yield from done

    def _attempt(self, decoder: Decoder, parts: list[Part], trains: bool) -> None:
        """Compute a microbatch, and recover if it raises."""
        error = self._raised(decoder, parts, trains)
        if error is not None and is_out_of_memory(error):
            self._split(decoder, parts, trains)
        elif error is not None:
            self._one_by_one(decoder, parts, trains)

    def _split(self, decoder: Decoder, parts: list[Part], trains: bool) -> None:
        """Compute a microbatch that ran out of memory in smaller ones, down to one part at a time, and pack later ones
        as small. Each part is a LoRA group, so the results are the same bits. A part that does not fit alone, nor when
        what is here for other ranks has made room, fails its operation: cut finer, its sums would differ from those of
        a machine with more memory."""
        self._room_tokens = min(self._room_tokens, sum(part.tokens for part in parts))
        fits = False
        while not fits:
            self._relieve()
            self._room_tokens = max(1, self._room_tokens // 2)
            log.warning("out of memory; again with %d tokens at a time", self._room_tokens)
            parts = _anew(_alive(parts))
            fits = all(self._fits(decoder, _alive(batch), trains) for batch in self._pack(parts))

    def _fits(self, decoder: Decoder, parts: list[Part], trains: bool) -> bool:
        """Compute `parts`, or return False if memory runs out and they can be split further."""
        error = self._raised(decoder, parts, trains) if parts else None
        if error is None:
            return True
        if not is_out_of_memory(error):
            self._one_by_one(decoder, parts, trains)
            return True
        if len(parts) > 1 or (not parts[0].progress.run.guest and self._together.give_way()):
            return False
        _unfit(parts[0])
        return True

    def _raised(self, decoder: Decoder, parts: list[Part], trains: bool) -> Exception | None:
        """Compute a microbatch. Returns the exception it raised, without its frames, which would keep tensors alive."""
        raised: Exception | None = None
        self._together.begin(trains)
        try:
            run_microbatch(decoder, parts, trains=trains)
        except Exception as error:
            if not is_out_of_memory(error):
                log.exception("a microbatch failed")
            raised = error.with_traceback(None)
        self._together.end(trains)
        return raised

    def _one_by_one(self, decoder: Decoder, parts: list[Part], trains: bool) -> None:
        """Compute the operations of a microbatch that raised one by one, so that only the faulty one fails."""
        for progress in dict.fromkeys(part.progress for part in parts):
            for part in _anew([part for part in parts if part.progress is progress]):
                error = self._raised(decoder, [part], trains)
                if error is None:
                    continue
                if is_out_of_memory(error):
                    _unfit(part)
                else:
                    progress.fail(f"{type(error).__name__}: {error}")
                break


def _unfit(part: Part) -> None:
    """Fail a part for which there is no memory even alone."""
    part.progress.unfit = True
    part.progress.fail(too_large(part), "user")


def _alive(parts: list[Part]) -> list[Part]:
    """Parts whose operations have not failed; the others stay in the microbatch, unused."""
    return [part for part in parts if part.progress.failure is None]


def _anew(parts: list[Part]) -> list[Part]:
    """These parts and all earlier ones of their operations: a repeat starts from an operation's first part, because its
    arena may hold an incomplete gradient."""
    again: list[Part] = []
    for progress in dict.fromkeys(part.progress for part in parts):
        again += dict.fromkeys(progress.restart() + [part for part in parts if part.progress is progress])
    return again
