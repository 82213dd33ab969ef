"""The order of one run's operations, and what rebuilds it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.compose import compose
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.operations import INTERACTIVE, Operation
from scheduler.order.plans import BODY_ONLY, ForwardBackward, Plan, Slice
from tests.search import chance


def spec(run: str = "run") -> RunSpec:
    return RunSpec(run, "m", 8, 32.0, 0, True, True, True)


def op(
    seq: int, kind: str = "forward_backward", tokens: int = 10, run: str = "run", org: str = "o", plan: Plan = BODY_ONLY
) -> Operation:
    return Operation(f"{run}-{seq}", org, "s", run, seq, kind, "m", tokens, f"ops/{seq}", plan, datetime.now(UTC))


def sent(units: list[Unit]) -> list[tuple[int, str, bool]]:
    return [(u.send.seq, str(u.send.kind), u.send.replay) for u in units]


def created() -> RunLane:
    lane = RunLane("o", spec())
    first = op(0, "create")
    assert sent(lane.arrive(first)) == [(0, "create", False)]
    lane.answered(first, ok=True)
    return lane


def test_what_arrives_early_is_parked_and_released_in_order() -> None:
    lane = created()
    second, third = op(2), op(3, "optim_step")
    assert lane.arrive(third) == []
    assert lane.arrive(second) == []
    assert lane.missing(third) == 1
    assert [s for s, _, _ in sent(lane.arrive(op(1)))] == [1, 2, 3]
    assert lane.missing(third) is None


@given(st.permutations(list(range(1, 9))))
def test_any_order_of_arrival_runs_in_order(order: list[int]) -> None:
    lane = created()
    released = [u.send.seq for seq in order for u in lane.arrive(op(seq))]
    assert released == list(range(1, 9))


def test_slices_of_one_operation_follow_each_other_and_the_last_is_final() -> None:
    units = created().arrive(op(1, plan=ForwardBackward((Slice(0, 3, 30), Slice(3, 5, 20)))))
    assert [(u.send.start, u.send.stop, u.tokens, u.send.final) for u in units] == [(0, 3, 30, False), (3, 5, 20, True)]


def test_a_lost_trainer_means_the_log_again_and_then_what_is_pending() -> None:
    lane = created()
    done, read, failed, pending = op(1), op(2, "forward"), op(3), op(4, "optim_step")
    for o in (done, read, failed, pending):
        lane.arrive(o)
    lane.answered(done, ok=True)
    lane.answered(read, ok=True)
    lane.answered(failed, ok=False)
    assert sent(lane.lost()) == [(0, "create", True), (1, "forward_backward", True), (4, "optim_step", False)]


def test_an_idle_run_is_rebuilt_only_when_it_is_needed() -> None:
    lane = created()
    assert lane.lost() == []
    assert sent(lane.arrive(op(1))) == [(0, "create", True), (1, "forward_backward", False)]
    assert sent(lane.arrive(op(2))) == [(2, "forward_backward", False)]


def test_a_snapshot_shortens_the_log() -> None:
    lane = created()
    for seq, kind in ((1, "forward_backward"), (2, "optim_step"), (3, "forward_backward")):
        o = op(seq, kind)
        lane.arrive(o)
        lane.answered(o, ok=True)
    assert [o.seq for o in lane.saved(2, "runs/run/state-2")] == [0, 1, 2]
    lane.lost()
    units = lane.arrive(op(4))
    assert sent(units) == [(2, "create", True), (3, "forward_backward", True), (4, "forward_backward", False)]
    assert units[0].send.source_ref == "runs/run/state-2"
    assert units[0].send.with_optimizer


def test_an_operation_that_is_refused_while_parked_leaves_the_lane() -> None:
    lane = created()
    parked = op(2)
    lane.arrive(parked)
    lane.answered(parked, ok=False)
    assert lane.idle


def push(tree: FairTree[Unit], unit: Unit) -> None:
    assert unit.op is not None
    tree.push((unit.base_model, unit.op.org_id, INTERACTIVE, unit.op.lane), unit, unit.tokens)


def queue(*units: Unit) -> FairTree[Unit]:
    tree: FairTree[Unit] = FairTree()
    for unit in units:
        push(tree, unit)
    return tree


def units(run: str, org: str, *costs: int | str) -> list[Unit]:
    lane = RunLane(org, spec(run), next_seq=1)
    lane.resident = True
    made = []
    for seq, cost in enumerate(costs, 1):
        kind, tokens = ("forward_backward", cost) if isinstance(cost, int) else (cost, 1)
        made += lane.arrive(op(seq, kind, tokens, run, org))
    return made


def names(units: list[Unit]) -> list[str]:
    return [u.send.op_id for u in units]


def test_a_pass_carries_several_tenants_up_to_its_budget() -> None:
    tree = queue(*units("a", "A", 40, 40, 40), *units("b", "B", 40, 40))
    assert names(compose(tree, ["m"], 100)) == ["a-1", "b-1"]
    assert names(compose(tree, ["m"], 100)) == ["a-2", "b-2"]
    assert names(compose(tree, ["m"], 100)) == ["a-3"]
    assert compose(tree, ["m"], 100) == []


def test_an_optimizer_step_rides_along_with_its_batch() -> None:
    tree = queue(*units("a", "A", 90, "optim_step", "save_sampler", 90), *units("b", "B", 90, "optim_step"))
    assert names(compose(tree, ["m"], 100)) == ["a-1", "a-2", "a-3"]
    assert names(compose(tree, ["m"], 100)) == ["b-1", "b-2"]


def test_one_operation_larger_than_the_budget_still_runs() -> None:
    assert names(compose(queue(*units("a", "A", 500)), ["m"], 100)) == ["a-1"]


def test_a_small_request_waits_for_at_most_one_pass_of_a_flood() -> None:
    tree = queue(*units("flood", "A", *[100] * 50))
    compose(tree, ["m"], 100)
    (small,) = units("small", "B", 5)
    push(tree, small)
    assert "small-1" in names(compose(tree, ["m"], 100))


def test_the_smallest_run_of_a_pass_is_first_and_runs_keep_their_order() -> None:
    tree = queue(*units("big", "A", 40, 20), *units("small", "B", 5), *units("mid", "C", 30))
    assert names(compose(tree, ["m"], 100)) == ["small-1", "mid-1", "big-1", "big-2"]


def test_other_models_are_left_for_their_own_pass() -> None:
    assert compose(queue(*units("a", "A", 5)), ["other"], 100) == []


def test_riders_have_what_the_pass_has_left() -> None:
    tree = queue(*units("a", "A", 90, *["optim_step"] * 30), *units("b", "B", 90), *units("c", "C", 90, "save_state"))
    riders = 1 + 91 // 8
    assert names(compose(tree, ["m"], 91)) == [f"a-{i}" for i in range(1, 2 + riders)]
    # Of b's pass a single token is left, for anybody.
    assert names(compose(tree, ["m"], 91)) == ["b-1", f"a-{2 + riders}"]


def test_what_was_running_when_a_trainer_died_travels_alone() -> None:
    suspect, other = units("a", "A", 10), units("b", "B", 10, 10)
    suspect[0].op.attempts = 1  # type: ignore[union-attr]
    tree = queue(*other, *suspect)
    passes = [names(p) for p in iter(lambda: compose(tree, ["m"], 100), [])]
    assert ["a-1"] in passes
    assert sorted(name for taken in passes for name in taken) == ["a-1", "b-1", "b-2"]


@pytest.mark.search
def test_nothing_is_lost_or_reordered_by_composing() -> None:
    rng = chance(0)
    tree: FairTree[Unit] = FairTree()
    expected: dict[str, list[str]] = {}
    for i in range(12):
        made = units(f"r{i}", f"o{i % 4}", *[rng.choice([1, 7, 60, 200, "optim_step", "save_state"]) for _ in range(9)])
        expected[f"r{i}"] = names(made)
        for unit in made:
            push(tree, unit)
    got: dict[str, list[str]] = {}
    while taken := compose(tree, ["m"], 128):
        for unit in taken:
            got.setdefault(unit.send.run_id, []).append(unit.send.op_id)
    assert got == expected
    assert OpKind.OPTIM_STEP in {u.send.kind for u in units("x", "y", "optim_step")}
