"""The runs that a trainer holds, in memory or paged out: their open operations, when they are saved, and how they
leave."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import HandedOver, Snapshot, TrainOp
from store.blobs.contract import Blobs
from workers.trainer.progress import Progress
from workers.trainer.runs.pages import PageError
from workers.trainer.runs.residency import resident_within, waves
from workers.trainer.runs.state import RunState, save_snapshot

log = logging.getLogger(__name__)
#: How often the state of a run is saved while it is rebuilt, and until the operations that were pending when its
#: trainer was lost are done: so that even trainers which die again soon make progress. Saving takes at most a tenth of
#: the time.
SAVE_AGAIN_S, SAVING_SHARE = 2.0, 0.1

#: Tells the server one thing.
Tell = Callable[[msgspec.Struct], None]


class Send(Protocol):
    """Tells the server something; several things together, in their order."""

    def __call__(self, *messages: msgspec.Struct) -> None: ...


class HeldRuns:
    """Runs by their id. Those that do not fit in memory are in files in `pages_dir` (default: beside the blobs)."""

    def __init__(self, blobs: Blobs, bounds: TrainerBounds, pages_dir: Path | None, device: torch.device) -> None:
        self.runs: dict[str, RunState] = {}
        self.open: dict[str, Progress] = {}  # operations with slices still to come, by their id
        self.residency = resident_within(bounds, pages_dir or blobs.root.with_name("pages"), device)
        self._blobs, self._bounds = blobs, bounds
        self._saved_in_s = 0.0  # how long the last save took
        #: Frees memory that is used for other ranks; returns whether there was any.
        self.give_way: Callable[[], bool] = lambda: False

    def add(self, run: RunState) -> None:
        self.residency.add(run)
        self.runs[run.spec.run_id] = run

    def _begun(self, run_id: str) -> list[Progress]:
        """The operations of a run whose last slice has not come yet."""
        return [progress for progress in self.open.values() if progress.op.run_id == run_id and not progress.ended]

    def abandon(self, op: TrainOp) -> None:
        """Give up the run's other open operations: since `op` has come instead, their remaining slices never will."""
        for progress in self._begun(op.run_id):
            self.bring(progress.run)
            progress.abandon()
            del self.open[progress.op.op_id]
        run = self.runs.get(op.run_id)
        if run is not None and run.part is not None and run.part.op_id != op.op_id:
            self.bring(run)
            run.give_up(run.part.op_id)
            run.part = None

    def give_up(self, run_id: str, why: str) -> bool:
        """The run takes no further part in this pass, and its open operations end here. Returns whether the run is
        still what it was before them, which is what they would continue from."""
        begun = [progress for progress in self.open.values() if progress.op.run_id == run_id]
        for progress in begun:
            progress.fail(why)
            progress.abandon()  # its gradient may be spoilt: the operation begins anew
            del self.open[progress.op.op_id]
        return not any(progress.parts or progress.saved for progress in begun)

    def bring(self, *runs: RunState) -> None:
        """Return when all these runs are in memory. OSError when there is none for them now."""
        own = [run for run in runs if not run.guest]
        try:
            self.residency.need(own)
        except OSError:
            if not self.give_way():
                raise
            self.residency.need(own)

    def make_room(self, *runs: RunState) -> None:
        """Free everything in memory except these runs."""
        self.residency.hold_only(runs)
        self.give_way()

    def waves(self, sizes: Mapping[str, int], soon: list[str]) -> Iterator[list[str]]:
        """The runs of a pass, of so many bytes, in sets that fit in memory. Each set, and the next behind it, is being
        paged in when it is given out; behind the last come the runs of the next pass. Runs in memory go first:
        computing them hides the time that the others take to be paged in."""
        here_first = sorted(sizes, key=lambda run_id: not self.residency.is_here(run_id))
        sets = waves({run_id: sizes[run_id] for run_id in here_first}, self.residency.budget_bytes)
        for wave, next_wave in zip(sets, [*sets[1:], soon], strict=False):
            order = [*wave, *self._fitting(next_wave, beside=sum(sizes[run_id] for run_id in wave))]
            self.residency.hold(order)
            for run_id in order:
                if (run := self.runs.get(run_id)) is not None:
                    self.residency.fetch(run)
            yield wave
        self.residency.hold([])

    def _fitting(self, run_ids: list[str], beside: int) -> list[str]:
        """The first of these runs, as many as fit in memory together with `beside` other bytes."""
        room = self.residency.budget_bytes - beside
        sizes = [self.runs[run_id].kind.size_bytes if run_id in self.runs else 0 for run_id in run_ids]
        return [run_id for run_id, total in zip(run_ids, accumulate(sizes), strict=True) if total <= room]

    def drain(self, send: Tell) -> None:
        """Snapshot every changed run."""
        for run in sorted(self.runs.values(), key=lambda run: not self.residency.is_here(run.spec.run_id)):
            if self._is_changed(run):
                self.residency.hold([run.spec.run_id])
                self.snapshot(run, send)

    def hand_over(self, run_id: str, send: Tell) -> None:
        """Save a run and forget it; a run that cannot be saved stays."""
        run = self.runs.get(run_id)
        kept = False
        if run is not None and self._is_changed(run):
            self.residency.hold([run_id])
            kept = not self.snapshot(run, send)
        if not kept:
            self.forget(run_id)
        send(HandedOver(run_id, kept))

    def forget(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self.open = {op_id: progress for op_id, progress in self.open.items() if progress.op.run_id != run_id}
        self.residency.forget(run_id)

    def is_due(self, run: RunState, again: bool) -> bool:
        """True if the run's state has to be saved now. `again`: the run is being rebuilt after a trainer was lost."""
        if any(progress.failure is not None for progress in self._begun(run.spec.run_id)):
            return False  # a failed operation is about to end, and leaves nothing to save
        apart_s = max(SAVE_AGAIN_S, self._saved_in_s * len(self.runs) / SAVING_SHARE)
        often = again and time.monotonic() - run.saved_at >= apart_s
        return self._is_changed(run) and (often or run.unsaved_tokens >= self._bounds.snapshot_every_tokens)

    def _is_changed(self, run: RunState) -> bool:
        return run.unsaved or self._half_done(run) is not None

    def _half_done(self, run: RunState) -> Progress | None:
        """The run's open operation of which a part is computed. A failed one does not count: a trainer that continued
        it would not know of the failure, so the next trainer begins it anew, and it fails again."""
        begun = self._begun(run.spec.run_id)
        return next((progress for progress in begun if progress.parts and progress.failure is None), None)

    def snapshot(self, run: RunState, send: Tell) -> bool:
        """Save a snapshot. Returns False if it could not be written, or there is no memory for the run: then the older
        one still holds."""
        run_id = run.spec.run_id
        progress = self._half_done(run)
        part = progress.part_done() if progress is not None else run.part
        name = f"runs/{run_id}/state-{run.last_seq}" + (f".{part.stop}" if part is not None else "")
        began = time.monotonic()
        try:
            # A snapshot of that name may be the journal's current one: it stays until the journal knows the new one.
            ref = f"{name}-{secrets.token_hex(4)}" if self._blobs.exists(name) else name
            self.bring(run)
            save_snapshot(run, part, self._blobs, ref)
        except PageError:
            raise
        except Exception:
            log.exception("run %s could not be saved; the next step tries again", run_id)
            return False
        run.saved_seq, run.unsaved_tokens, run.saved_at = run.last_seq, 0, time.monotonic()
        for begun in self._begun(run_id):
            begun.saved = begun is progress
        self._saved_in_s = run.saved_at - began
        part_op, part_stop = (part.op_id, part.stop) if part is not None else ("", 0)
        send(Snapshot(run_id, run.last_seq, ref, part_op, part_stop))
        return True
