"""What goes into the next pass, and what a trainer is told of the passes to come."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.order.compose import ALONG, MAX_UPCOMING, compose, upcoming
from scheduler.order.fair import FairTree

BUDGET = 800
#: The room beyond the budget.
ALONG_TOKENS = 100


@dataclass(frozen=True)
class Piece:
    """The parts of a `Unit` that composing looks at."""

    run: str
    tokens: int
    light: bool = False
    suspect: bool = False
    send: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "send", SimpleNamespace(run_id=self.run))


def queue_of(*pieces: tuple[str, Piece, int], model: str = "m") -> FairTree[Any]:
    """A queue of (organisation, piece, cost)."""
    queue: FairTree[Any] = FairTree()
    for org, piece, cost in pieces:
        queue.push((model, org, "batch", piece.run), piece, cost)
    return queue


def heavy(org: str, run: str, tokens: int, **more: Any) -> tuple[str, Piece, int]:
    return org, Piece(run, tokens, **more), tokens


def light(org: str, run: str, cost: int, **more: Any) -> tuple[str, Piece, int]:
    return org, Piece(run, 0, light=True, **more), cost


def taken(queue: FairTree[Any], **more: Any) -> list[tuple[str, int]]:
    return [(unit.send.run_id, unit.tokens) for unit in compose(queue, ["m"], BUDGET, **more)]


def test_the_room_beyond_the_budget() -> None:
    assert BUDGET * ALONG == ALONG_TOKENS


def test_a_pass_is_filled_to_the_budget_and_not_beyond() -> None:
    fits = queue_of(heavy("x", "a", 400), heavy("y", "b", 400), heavy("x", "a", 1))
    assert taken(fits) == [("a", 400), ("b", 400)]
    assert taken(fits) == [("a", 1)]
    assert taken(fits) == []
    too_much = queue_of(heavy("x", "a", 400), heavy("y", "b", 401))
    assert taken(too_much) == [("a", 400)]
    assert taken(too_much) == [("b", 401)]


def test_the_first_is_taken_whatever_its_size() -> None:
    assert taken(queue_of(heavy("x", "a", 10 * BUDGET), heavy("y", "b", 1))) == [("a", 10 * BUDGET)]


def test_the_smallest_run_stands_first_and_runs_keep_their_order() -> None:
    queue = queue_of(*(heavy("x", "a", tokens) for tokens in (90, 10, 30)), heavy("y", "b", 100), heavy("z", "c", 130))
    assert taken(queue) == [("b", 100), ("a", 90), ("a", 10), ("a", 30), ("c", 130)]


def test_light_work_of_runs_in_the_pass_rides_along_beyond_the_budget() -> None:
    queue = queue_of(heavy("x", "a", BUDGET), light("x", "a", 60), light("x", "a", 40), light("x", "a", 1))
    assert taken(queue) == [("a", BUDGET), ("a", 0), ("a", 0)]
    assert len(compose(queue, ["m"], BUDGET)) == 1
    alone = queue_of(heavy("x", "a", BUDGET), light("x", "a", ALONG_TOKENS + 1))
    assert taken(alone) == [("a", BUDGET)]


@pytest.mark.parametrize(("cost", "rides"), [(136, True), (137, False)])
def test_light_work_that_rides_along_has_what_is_left_and_the_room_beyond(cost: int, rides: bool) -> None:
    queue = queue_of(heavy("x", "a", BUDGET - 36), light("x", "a", cost))
    assert taken(queue) == [("a", BUDGET - 36), ("a", 0)][: 1 + rides]


def test_light_work_of_others_takes_what_is_left_of_the_budget_alone() -> None:
    queue = queue_of(heavy("x", "a", BUDGET - 50), heavy("y", "b", 60), light("z", "c", 30), light("w", "d", 30))
    got = taken(queue)
    # In fair order `b` is next and does not fit. Behind it is room for one of the light ones, not for both.
    assert got[0] == ("a", BUDGET - 50)
    assert len(got) == 2
    assert got[1] in [("c", 0), ("d", 0)]
    full = queue_of(heavy("x", "a", BUDGET), light("z", "c", 1))
    assert taken(full) == [("a", BUDGET)], "the room beyond is for the runs that are in the pass"


def test_no_rider_passes_the_work_before_it() -> None:
    queue = queue_of(heavy("x", "a", BUDGET - 10), heavy("x", "a", 50), light("x", "a", 1))
    assert taken(queue) == [("a", BUDGET - 10)]


@pytest.mark.parametrize("kind", [heavy, light])
def test_a_suspect_travels_alone(kind: Any) -> None:
    first = queue_of(kind("x", "a", 10, suspect=True), heavy("y", "b", 10))
    assert [unit.send.run_id for unit in compose(first, ["m"], BUDGET)] == ["a"]
    assert [unit.send.run_id for unit in compose(first, ["m"], BUDGET)] == ["b"]
    later = queue_of(heavy("x", "a", 10), kind("x", "a", 10, suspect=True), heavy("x", "a", 10))
    assert [piece.suspect for piece in compose(later, ["m"], BUDGET)] == [False]
    assert [piece.suspect for piece in compose(later, ["m"], BUDGET)] == [True]


def test_a_trainer_gets_its_models_and_its_runs() -> None:
    queue = queue_of(heavy("x", "a", 10), heavy("y", "b", 10), light("y", "b", 1))
    assert compose(queue, ["other"], BUDGET) == []
    assert taken(queue, only=lambda run: run == "b") == [("b", 10), ("b", 0)]
    assert taken(queue, only=lambda run: run == "b") == []
    assert taken(queue) == [("a", 10)]
    full = queue_of(heavy("y", "b", BUDGET), light("y", "b", 50), light("y", "c", 1))
    assert taken(full, only=lambda run: run == "b") == [("b", BUDGET), ("b", 0)], (
        "a rider beyond the budget is its run's"
    )
    queue = queue_of(heavy("x", "a", 10), model="first")
    queue.push(("m", "x", "batch", "b"), Piece("b", 10), 10)
    assert taken(queue) == [("b", 10)]


def test_upcoming_takes_turns_among_organisations() -> None:
    queue: FairTree[Any] = FairTree()
    for path in (("m", "x", "x1"), ("m", "x", "x2"), ("m", "x", "x1"), ("m", "y", "y1"), ("other", "z", "z1")):
        queue.push((*path[:2], "batch", path[2]), object(), 10)
    assert upcoming(queue, "m") == ["x1", "y1", "x2"]
    assert upcoming(queue, "other") == ["z1"]
    assert upcoming(queue, "none") == []
    assert upcoming(queue, "m", lambda run: run.startswith("x")) == ["x1", "x2"]
    assert sum(1 for _ in queue) == 5


def test_upcoming_is_bounded() -> None:
    queue: FairTree[Any] = FairTree()
    for i in range(3 * MAX_UPCOMING):
        queue.push(("m", "x", "interactive", f"run{i}"), object(), 10)
    assert upcoming(queue, "m") == [f"run{i}" for i in range(MAX_UPCOMING)]
