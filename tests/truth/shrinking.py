"""Makes a program and a schedule smaller as long as their plays still differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.truth.programs import Batch, Program
from tests.truth.schedules import Schedule

Case = tuple[Program, Schedule]

#: Fields of operations that name other things: runs, samplers, sessions.
_KEPT = ("run", "session", "batch", "seed", "sampler", "source", "name", "fault")


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 150) -> Case:
    """The smallest case found, within so many tries, that still `fails`."""
    left = tries
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if left == 0:
                return case
            left -= 1
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Slightly smaller variants of `case`, the largest cuts first."""
    program, schedule = case
    for size in _halves(len(program)):
        for start in range(len(program) - size, -1, -size):
            yield program[:start] + program[start + size :], schedule
    for index in range(len(schedule.mishaps)):
        rest = schedule.mishaps[:index] + schedule.mishaps[index + 1 :]
        yield program, replace(schedule, mishaps=rest)
    for field in fields(Schedule):
        plain = {"pass_tokens": 100, "microbatch_tokens": 64}.get(field.name, field.default)
        if field.name not in ("patient", "mishaps", "seed") and getattr(schedule, field.name) != plain:
            yield program, replace(schedule, **{field.name: plain})
    for index, op in enumerate(program):
        for changed in _smaller_operation(op):
            yield (*program[:index], changed, *program[index + 1 :]), schedule


def _halves(count: int) -> Iterator[int]:
    size = count // 2
    while size:
        yield size
        size //= 2


def _smaller_operation(op: Any) -> Iterator[Any]:
    """Variants of an operation with one field at its default, or with fewer data."""
    batch = getattr(op, "batch", None)
    if batch is not None and len(batch.lengths) > 1:
        half = len(batch.lengths) // 2
        yield replace(op, batch=replace(batch, lengths=batch.lengths[:half]))
        yield replace(op, batch=replace(batch, lengths=batch.lengths[:-1]))
    if batch is not None and (batch.loss, batch.config, batch.targets) != ("cross_entropy", (), 1):
        yield replace(op, batch=Batch(batch.lengths, batch.seed))
    for field in fields(op):
        if field.name not in _KEPT and getattr(op, field.name) != field.default:
            yield replace(op, **{field.name: field.default})
