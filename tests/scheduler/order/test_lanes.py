"""The order of one run's operations, and how a run is rebuilt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, strategies as st
from weft.wire.checks.runs import step_not_taken

from scheduler.links.messages import OpKind, RunSpec, Snapshot, TrainOp
from scheduler.order.compose import compose
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit, units_of, uses_gradients
from scheduler.order.operations import INTERACTIVE, Operation, Outcome
from scheduler.order.plans import BODY_ONLY, Create, ForwardBackward, Load, Plan, Save, Slice, Source, Step
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
    units = created().arrive(op(1, plan=ForwardBackward((Slice(0, 3, 30), Slice(3, 5, 20), Slice(5, 6, 9)))))
    told = [(u.send.start, u.send.stop, u.tokens, u.send.final) for u in units]
    assert told == [(0, 3, 30, False), (3, 5, 20, False), (5, 6, 9, True)]


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
    assert units[0].tokens == 0


def test_a_run_with_a_snapshot_is_read_from_it_after_a_restart() -> None:
    lane = RunLane("o", spec(), next_seq=3, snapshot=Snapshot("run", 2, "runs/run/state-2"))
    assert sent(lane.arrive(op(3))) == [(2, "create", True), (3, "forward_backward", False)]


def test_what_has_no_data_is_light() -> None:
    kinds = "forward", "forward_backward", "optim_step", "save_state"
    assert [unit.light for kind in kinds for unit in units_of(op(1, kind), spec())] == [False, False, True, True]


def test_an_operation_that_is_refused_while_parked_leaves_the_lane() -> None:
    lane = created()
    parked = op(2)
    lane.arrive(parked)
    assert not lane.idle
    lane.answered(parked, ok=False)
    assert lane.idle


SOURCE = Source("weights/w", "tinker://r/weights/w", with_optimizer=True)


@pytest.mark.parametrize(
    ("kind", "plan", "says"),
    [
        ("create", Create(spec(), "interactive"), {"spec": spec()}),
        (
            "create",
            Create(spec(), "interactive", SOURCE),
            {"spec": spec(), "source_ref": "weights/w", "with_optimizer": True},
        ),
        ("load_state", Load(SOURCE), {"source_ref": "weights/w", "with_optimizer": True}),
        ("load_state", Load(Source("weights/w", "", with_optimizer=False)), {"source_ref": "weights/w"}),
        ("save_state", Save("weights", "n"), {"target_ref": "weights/run-1"}),
        ("optim_step", Step({}), {}),
        ("forward", ForwardBackward((Slice(0, 3, 10),)), {"stop": 3}),
    ],
)
def test_a_trainer_is_told_all_that_it_needs(kind: str, plan: Plan, says: dict[str, object]) -> None:
    made = op(1, kind, plan=plan)
    made.body, made.body_sha256, made.origin = b"body", "digest", "request"
    same = {"body": b"body", "body_ref": "ops/1", "body_sha256": "digest", "origin": "request", "org_id": "o"}
    told = TrainOp("run-1", "run", 1, OpKind(kind), **same | says)  # type: ignore[arg-type]
    assert [unit.send for unit in units_of(made, spec())] == [told]


def test_a_number_that_was_refused_holds_nothing_up_and_is_spent() -> None:
    lane = created()
    assert sent(lane.arrive(op(3))) == []
    assert lane.refuse(2) == []
    assert [lane.spent(seq) for seq in range(5)] == [True, False, True, True, False]
    assert sent(lane.refuse(1)) == [(3, "forward_backward", False)]
    assert lane.refuse(1) == []
    assert [lane.spent(seq) for seq in range(5)] == [True, True, True, True, False]
    assert sent(lane.arrive(op(4))) == [(4, "forward_backward", False)]


def answer(lane: RunLane, made: Operation, error: str | None = None) -> None:
    made.outcome = Outcome(error=error)
    lane.answered(made, error is None)


def test_what_a_snapshot_has_of_an_operation_is_not_computed_again() -> None:
    lane = created()
    large = op(1, plan=ForwardBackward((Slice(0, 3, 30), Slice(3, 5, 20), Slice(5, 6, 9))))
    lane.arrive(large)
    lane.saved(0, "runs/run/state-0", large.id, 3)
    assert [(u.send.start, u.send.final, u.send.again) for u in lane.lost()[1:]] == [(3, False, True), (5, True, True)]
    answer(lane, large)
    lane.lost()
    other = op(2, run="another", plan=ForwardBackward((Slice(0, 1, 1), Slice(1, 9, 1))))  # an id that sorts before
    rebuilt = lane.arrive(other)
    assert [(u.send.seq, u.send.start) for u in rebuilt] == [(0, 0), (1, 3), (1, 5), (2, 0), (2, 1)]
    lane.saved(1, "runs/run/state-1")
    assert [(u.send.op_id, u.send.start) for u in lane.lost()] == [("restore-run", 0), (other.id, 0), (other.id, 1)]


def test_what_a_trainer_died_over_is_suspected_until_it_is_answered() -> None:
    lane = created()
    lane.arrive(first := op(1))
    first.attempts, first.alone, first.reached = 1, True, 3
    lane.setbacks = 1
    lane.saved(0, "runs/run/state-0")
    assert [unit.suspect for unit in lane.lost()] == [True, True]
    answer(lane, first)
    lane.got_on()
    assert lane.setbacks == 0
    assert (first.attempts, first.alone, first.reached) == (0, False, 0)
    assert lane.lost() == []
    assert [unit.suspect for unit in lane.arrive(op(2))] == [False, False, False]


def test_a_run_that_is_paused_queues_nothing_until_it_is_resumed() -> None:
    lane = created()
    lane.arrive(first := op(1))
    lane.pause("the disk is away", kept=True)
    assert lane.arrive(op(2)) == []
    assert lane.lost() == []
    assert lane.setbacks == 1
    again = lane.resume()
    assert sent(again) == [(0, "create", True), (1, "forward_backward", False), (2, "forward_backward", False)]
    answer(lane, first)
    lane.pause("the disk is away", kept=True)  # its trainer still holds it
    again = lane.resume()
    assert sent(again) == [(2, "forward_backward", False)]
    assert [unit.send.again for unit in again] == [True]
    lane.pause("the run could not be read", kept=False)
    replayed = [(0, "create", True), (1, "forward_backward", True)]
    assert sent(lane.resume()) == [*replayed, (2, "forward_backward", False)]


def test_a_run_is_rebuilt_where_something_behind_what_it_left_out_has_been_answered() -> None:
    """Its trainer has forgotten nothing, but the replays for it are in no queue any more."""
    lane = created()
    lane.arrive(first := op(1))
    lane.arrive(second := op(2, "optim_step"))
    answer(lane, second)
    assert lane.is_past(first)
    assert not lane.is_past(second)
    lane.pause("the disk is away", kept=True)
    assert sent(lane.resume()) == [(0, "create", True), (1, "forward_backward", False), (2, "optim_step", True)]


def test_a_run_that_is_given_up_says_what_it_leaves() -> None:
    lane = created()
    lane.arrive(first := op(1))
    lane.arrive(third := op(3))
    assert lane.at_work
    assert lane.parked == [third]
    assert lane.abandon() == [first, third]
    assert lane.idle
    assert not lane.at_work


NOT_TAKEN = step_not_taken("forward_backward", "NaN")


@pytest.mark.parametrize(
    ("kind", "error", "uses"),
    [
        ("optim_step", None, True),
        ("optim_step", NOT_TAKEN, True),
        ("optim_step", "the disk is full", False),
        ("load_state", None, True),
        ("load_state", "no such file", False),
        ("forward_backward", None, False),
        ("save_state", None, False),
    ],
)
def test_a_failure_is_known_to_who_was_told_and_over_with_other_weights(
    kind: str, error: str | None, uses: bool
) -> None:
    assert uses_gradients(kind, error) == uses
    lane = created()
    lane.arrive(bad := op(1))
    lane.gradients.failed(1, "bad")
    answer(lane, bad, "NaN")
    lane.gradients.over(1, bad.accepted_at)
    lane.arrive(between := op(2, kind))
    answer(lane, between, error)
    (step,) = lane.arrive(op(3, "optim_step", plan=Step({})))
    assert lane.sent(step).lacks == ((0, "") if uses or kind == "forward_backward" else (1, "bad"))


def test_a_step_is_told_what_it_lacks_unless_it_is_repeated_or_another_before_it_is_told() -> None:
    lane = created()
    lane.arrive(op(1))
    lane.gradients.failed(1, "bad")
    (first,) = lane.arrive(op(2, "optim_step", plan=Step({}, heard_of=0)))
    (second,) = lane.arrive(op(3, "optim_step", plan=Step({}, heard_of=1)))
    (save,) = lane.arrive(op(4, "save_state"))
    assert (lane.sent(first).lacks, lane.sent(first).knows) == ((1, "bad"), 0)
    assert (lane.sent(second).lacks, lane.sent(second).knows) == ((0, ""), 1)
    assert lane.sent(save) is save.send
    assert first.op is not None
    (replayed,) = units_of(first.op, spec(), replay=True)
    assert lane.sent(replayed) is replayed.send
    answer(lane, first.op, NOT_TAKEN)
    (third,) = lane.arrive(op(5, "optim_step", plan=Step({})))
    assert lane.sent(third) is third.send


@pytest.mark.parametrize(("after_s", "lacks"), [(-1, (1, NOT_TAKEN)), (0, (0, ""))])
def test_a_batch_whose_request_came_before_its_client_was_told_shows_nothing(
    after_s: int, lacks: tuple[int, str]
) -> None:
    """However long its data took to arrive."""
    lane, told = created(), datetime.now(UTC)
    lane.arrive(op(1))
    lane.failed(1, "forward_backward", "NaN")
    lane.gradients.over(1, told)
    lane.arrive(op(2, plan=ForwardBackward((Slice(0, 1, 1),), came_at=told + timedelta(seconds=after_s))))
    (step,) = lane.arrive(op(3, "optim_step", plan=Step({})))
    assert lane.sent(step).lacks == lacks


def test_a_step_lacks_what_failed_before_it_and_the_next_step_does_not() -> None:
    lane = created()
    lane.arrive(op(1))
    (save,) = lane.arrive(op(2, "save_state"))
    (data,) = lane.arrive(op(3))
    lane.failed(1, "forward_backward", "NaN")
    lane.failed(2, "save_state", "the disk is full")
    lane.arrive(op(4, "forward"))  # trains nothing, so it does not show what its client knows
    (first,) = lane.arrive(op(5, "optim_step", plan=Step({})))
    (second,) = lane.arrive(op(6, "optim_step", plan=Step({})))
    assert lane.sent(save) is save.send
    assert lane.sent(data) is data.send
    assert lane.sent(first).lacks == (1, NOT_TAKEN)
    assert lane.sent(second) is second.send


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
    # In b's pass a single token is left, for anybody.
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
