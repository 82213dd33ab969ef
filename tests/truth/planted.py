"""Faults planted into the code that the model plays, which it must find. Each has existed, or could come from an
ordinary slip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any
from unittest import mock

import msgspec

from scheduler.journal.ending import settlement as settle
from scheduler.journal.journal import Journal
from scheduler.journal.training import Training
from scheduler.links.messages import OpKind
from scheduler.order.lanes import RunLane, units_of
from workers.trainer.progress import Progress
from workers.trainer.runs.residency import Residency
from workers.trainer.runs.state import RunState
from workers.trainer.trainer import Trainer


@contextmanager
def _patched(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """RuntimeError at the end if a name that the fault uses does not exist: that failure would pass for being found."""
    fault = change(getattr(owner, name))
    wrong: list[AttributeError] = []

    def sync(*args: Any) -> Any:
        try:
            return fault(*args)
        except AttributeError as error:
            wrong.append(error)
            raise

    async def awaited(*args: Any) -> Any:
        try:
            return await fault(*args)
        except AttributeError as error:
            wrong.append(error)
            raise

    with mock.patch.object(owner, name, awaited if iscoroutinefunction(fault) else sync):
        try:
            yield
        finally:
            if wrong:
                raise RuntimeError(f"the fault planted into {owner.__name__}.{name} is out of date: {wrong[0]}")


def lost_gradient() -> AbstractContextManager[Any]:
    """When the next operation of a run begins, what earlier passes have computed of the previous one is forgotten."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: Trainer, op: Any) -> Progress:
            progress: Progress = real(self, op)
            for other in [other for other in self.held.open.values() if other.run is progress.run and other.parts]:
                self.held.bring(other.run)
                if other.grad is not None:
                    other.grad.flat.zero_()
            return progress

        return begin

    return _patched(Trainer, "_begin", change)


def snapshot_too_new() -> AbstractContextManager[Any]:
    """A snapshot is believed to contain the operation after it as well."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        async def snapshot(self: Training, taken: Any) -> None:
            await real(self, msgspec.structs.replace(taken, seq=taken.seq + 1))

        return snapshot

    return _patched(Training, "snapshot", change)


def short_replay() -> AbstractContextManager[Any]:
    """The last answered operation is not replayed."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def rebuild(self: RunLane, pending: Any) -> Any:
            log = self._log
            self._log = log[:-1] if len(log) > 1 else log
            try:
                return real(self, pending)
            finally:
                self._log = log

        return rebuild

    return _patched(RunLane, "_rebuild", change)


def added_twice() -> AbstractContextManager[Any]:
    """What was computed before memory ran out stays in the gradient when it is computed again."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def restart(self: Progress) -> Any:
            kept = None if self.grad is None else self.grad.flat.clone()
            parts = real(self)
            if kept is not None and self.grad is not None:
                self.grad.flat.copy_(kept)
            return parts

        return restart

    return _patched(Progress, "restart", change)


def applied_twice() -> AbstractContextManager[Any]:
    """A request that is sent again while its operation waits is queued a second time."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        async def accept(self: Journal, new: Any, *rows: Any) -> str:
            before = {op.id for op in self._open.values()}
            request_id: str = await real(self, new, *rows)
            op, lane = self._open.get(request_id), self.training.runs.get(new.lane)
            waits = op is not None and lane is not None and lane.missing(op) is None and not op.settling
            if request_id in before and waits and op.kind == OpKind.FORWARD_BACKWARD:
                self.training.queue_units(lane, units_of(op, lane.spec))
                self.wake()
            return request_id

        return accept

    return _patched(Journal, "accept", change)


def half_a_page() -> AbstractContextManager[Any]:
    """A run that was paged out comes back without its second moments."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def need(self: Residency, runs: Sequence[RunState]) -> None:
            away = [run for run in runs if run.arena is None]
            real(self, runs)
            for run in away:
                run.v.zero_()

        return need

    return _patched(Residency, "need", change)


def failures_billed() -> AbstractContextManager[Any]:
    """An operation that failed before anything was computed is billed; one that the API refused has no tokens, so for
    one."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def charge(row: Any, ending: Any, outcome: Any) -> Any:
            found = real(row, ending, outcome)
            failed_early = outcome.error is not None and not found.quantities
            return replace(found, quantities={"train": max(1, ending.op.tokens)}) if failed_early else found

        return charge

    return _patched(settle, "_charge", change)


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lost gradient": lost_gradient,
    "snapshot too new": snapshot_too_new,
    "short replay": short_replay,
    "added twice": added_twice,
    "applied twice": applied_twice,
    "half a page": half_a_page,
    "failures billed": failures_billed,
}
