"""An operation that spans passes keeps what it has computed, whatever else its run has in the same pass, also if its
state is paged or another trainer goes on with it. Compared with the whole operation in one pass."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from scheduler.links.messages import SAVES, Done, OpKind, SetAside, TrainOp
from tests.workers.model.adapters.test_writing import files_of_at_most
from tests.workers.trainer.kit import Bench, arenas, ce_data, output, replayed, restore, run_spec, sliced
from tests.workers.trainer.test_external import save_external
from workers.trainer.runs import held
from workers.trainer.runs.state import save_snapshot

MakeBench = Callable[..., Bench]
FIRST, SECOND = ce_data([9, 7, 8], 1), ce_data([6, 5, 7], 2)


def norm(done: Done) -> float:
    return float(json.loads(done.payload)["metrics"]["grad_norm:mean"])


def whole(bench: Bench, *batches: list[Any]) -> float:
    """The norm of the gradient of these batches, each in a pass of its own."""
    bench.ok(bench.create("a"))
    for batch in batches:
        bench.ok(bench.fb("a", batch))
    step = bench.optim("a")
    return norm(bench.ok(step)[step.op_id])


@pytest.mark.parametrize("budget", [0, 1], ids=["in memory", "paged"])
@pytest.mark.parametrize("next_kind", [OpKind.FORWARD_BACKWARD, OpKind.FORWARD], ids=["next trains", "next only looks"])
def test_the_last_slice_shares_its_pass_with_the_next_operation(
    make_bench: MakeBench, next_kind: OpKind, budget: int
) -> None:
    """Two batches sent one after the other, the first larger than a pass."""
    trains = next_kind is OpKind.FORWARD_BACKWARD
    expected = whole(make_bench(), FIRST, *([SECOND] if trains else []))
    bench = make_bench(resident_bytes=budget)
    bench.ok(bench.create("a"), bench.create("b"))
    one, two = bench.fb("a", FIRST), bench.fb("a", SECOND, kind=next_kind)
    (begin, middle, last), (again, *rest) = sliced(one, 1, 2), sliced(two, 1, 2)
    bench.go(begin)
    bench.ok(bench.fb("b", SECOND))
    bench.go(middle)
    bench.go(last, again)
    bench.go(*rest)
    step = bench.optim("a")
    assert norm(bench.ok(step)[step.op_id]) == pytest.approx(expected, rel=1e-6)


def test_many_open_operations_one_after_the_other(make_bench: MakeBench) -> None:
    batches = [ce_data([5, 6, 4], seed) for seed in range(5)]
    expected = whole(make_bench(), *batches)
    bench = make_bench(resident_bytes=1)
    bench.ok(bench.create("a"), bench.create("b"))
    slices = [part for batch in batches for part in sliced(bench.fb("a", batch), 1, 2)]
    for first in range(0, len(slices), 2):
        bench.go(*slices[first : first + 2])
        bench.ok(bench.fb("b", SECOND))
    step = bench.optim("a")
    assert norm(bench.ok(step)[step.op_id]) == pytest.approx(expected, rel=1e-6)


def test_an_operation_that_never_comes_to_its_end_leaves_nothing(bench: Bench) -> None:
    expected = None
    for run_id, abandoned in (("a", False), ("b", True)):
        bench.ok(bench.create(run_id, seed=5))
        if abandoned:
            bench.go(sliced(bench.fb(run_id, FIRST), 1)[0])
        bench.ok(bench.fb(run_id, SECOND))
        step = bench.optim(run_id)
        found = norm(bench.ok(step)[step.op_id])
        expected = found if expected is None else expected
        assert found == expected


@pytest.fixture
def saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "SAVE_AGAIN_S", 0.0)
    monkeypatch.setattr(held, "SAVING_SHARE", math.inf)


def again(op: TrainOp) -> TrainOp:
    return msgspec.structs.replace(op, again=True)


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("kind", [OpKind.FORWARD_BACKWARD, OpKind.FORWARD])
@pytest.mark.parametrize("accumulated", [False, True], ids=["alone", "behind a gradient"])
def test_a_trainer_that_lives_for_one_slice_at_a_time_gets_there(
    make_bench: MakeBench, kind: OpKind, accumulated: bool
) -> None:
    calm, shaken = make_bench(), make_bench()
    results = []
    for bench in (calm, shaken):
        bench.ok(bench.create("a"))
        if accumulated:
            bench.ok(bench.fb("a", SECOND))
        op = bench.fb("a", FIRST, kind=kind)
        if bench is calm:
            results.append(bench.ok(*sliced(op, 1, 2))[op.op_id].payload)
            continue
        parts = list(map(again, sliced(op, 1, 2)))
        for number, part in enumerate(parts):
            found = bench.go(*([restore(bench, bench.snapshots[-1])] if number else []), part)
            if not part.final:
                assert (bench.snapshots[-1].part_op, bench.snapshots[-1].part_stop) == (op.op_id, part.stop)
                bench.restart()
        results.append(found[op.op_id].payload)
    assert results[0] == results[1]
    for bench in (calm, shaken):
        bench.ok(bench.optim("a"))
    for one, other in zip(arenas(calm.run("a")), arenas(shaken.run("a")), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("saves_often")
def test_what_is_half_done_is_forgotten_when_another_operation_comes(bench: Bench) -> None:
    """The half-done operation has failed, so it is not sent again, and the next one begins on the run as it was."""
    bench.ok(bench.create("a"), bench.fb("a", SECOND))
    bench.go(again(sliced(bench.fb("a", FIRST), 1)[0]))
    snapshot = bench.snapshots[-1]
    bench.restart()
    bench.go(restore(bench, snapshot))
    step = bench.optim("a")
    found = norm(bench.ok(step)[step.op_id])
    bench.ok(bench.create("b", seed=run_spec("a").seed), bench.fb("b", SECOND))
    step = bench.optim("b")
    assert found == norm(bench.ok(step)[step.op_id])


@pytest.mark.usefixtures("saves_often")
def test_replays_save_how_far_they_are(bench: Bench) -> None:
    history = [bench.create("a")]
    for seed in range(3):
        history += [bench.fb("a", ce_data([5], seed)), bench.optim("a")]
    bench.ok(*history)
    wanted = [x.clone() for x in arenas(bench.run("a"))]
    bench.restart()
    bench.snapshots.clear()
    bench.go(*map(replayed, history[:3]))
    assert [s.seq for s in bench.snapshots] == [2]
    for number in (3, 5):
        bench.restart()
        bench.go(restore(bench, bench.snapshots[-1]), *map(replayed, history[number : number + 2]))
    for one, other in zip(arenas(bench.run("a")), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["drained", "handed over"])
def test_what_has_failed_half_way_fails_on_the_next_trainer_too(bench: Bench, how: str) -> None:
    """Its first slice has a loss that overflows; the trainer leaves before the last one has come."""
    bad = ce_data([9, 7, 8], 1)
    bad[0].inputs["weights"][:] = 3e38
    bench.ok(bench.create("a"), bench.fb("a", SECOND))
    op = bench.fb("a", bad)
    bench.go(sliced(op, 1)[0])
    bench.snapshots.clear()
    if how == "drained":
        bench.trainer.drain(bench.snapshots.append)
    else:
        bench.go(hand_over=["a"])
    (snapshot,) = bench.snapshots
    bench.restart()
    # The desk goes on behind the slices that the snapshot holds.
    rest = sliced(op, snapshot.part_stop) if snapshot.part_stop else [op]
    failure = bench.go(restore(bench, snapshot), rest[-1])[op.op_id].failure
    assert failure is not None
    assert "datum 0" in failure.message or "data 0" in failure.message


def test_runs_that_take_long_to_save_are_not_saved_most_of_the_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a GPU: four runs of 6 GB each were saved again and again while they were rebuilt. Here a save takes a
    second, and a step no time."""
    clock = SimpleNamespace(now=time.monotonic())

    def slow(*args: Any) -> None:
        clock.now += 1.0
        save_snapshot(*args)

    monkeypatch.setattr(held, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(held, "save_snapshot", slow)
    bench.ok(bench.create("a"), bench.create("b"))
    bench.snapshots.clear()
    for _ in range(60):
        clock.now += 1.0
        bench.go(*(again(bench.fb(run_id, SECOND)) for run_id in "ab"))
    saved = Counter(snapshot.run_id for snapshot in bench.snapshots)
    assert set(saved) == {"a", "b"}
    assert all(3 <= count <= 4 for count in saved.values())


def asides(bench: Bench) -> list[SetAside]:
    return [message for message in bench.sent if isinstance(message, SetAside)]


def test_a_replay_that_fails_leaves_no_run_behind(bench: Bench) -> None:
    """A body is cut short: operations after it are neither computed nor answered."""
    history = [bench.create("a"), bench.fb("a", FIRST), bench.optim("a"), bench.fb("a", SECOND), bench.optim("a")]
    bench.ok(*history)
    bench.restart()
    body = bench.blobs.path(history[1].body_ref)
    body.write_bytes(body.read_bytes()[:-60])
    later = bench.fb("a", FIRST)
    assert bench.go(*map(replayed, history), later) == {}
    (aside,) = asides(bench)
    assert (aside.run_id, aside.kept, aside.lasting) == ("a", False, True)
    assert "operation 1 (forward_backward) cannot be repeated" in aside.reason
    assert "damaged" in aside.reason
    assert "a" not in bench.trainer.held.runs


def test_a_snapshot_cut_short_is_told(bench: Bench) -> None:
    bench.ok(bench.create("a"), bench.fb("a", FIRST), bench.optim("a"))
    bench.trainer.drain(bench.snapshots.append)
    bench.restart()
    file = bench.blobs.path(bench.snapshots[-1].ref) / "extra.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert bench.go(restore(bench, bench.snapshots[-1]), bench.fb("a", SECOND)) == {}
    (aside,) = asides(bench)
    assert aside.lasting
    assert "its snapshot cannot be repeated: the checkpoint is damaged" in aside.reason


def test_a_disk_that_does_not_answer_fails_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ok(bench.create("a"), bench.create("b"))
    get, broken = bench.blobs.get, set[str]()

    def failing(ref: str, sha256: str = "") -> bytes:
        if ref in broken:
            raise OSError(5, "Input/output error")
        return get(ref, sha256)

    monkeypatch.setattr(bench.blobs, "get", failing)
    one, two, three = bench.fb("a", FIRST), bench.fb("a", SECOND), bench.optim("a")
    other = bench.fb("b", FIRST)
    broken.add(two.body_ref)
    assert set(bench.go(one, two, three, other)) == {one.op_id, other.op_id}
    assert [(aside.run_id, aside.kept, aside.lasting) for aside in asides(bench)] == [("a", True, False)]
    broken.clear()
    found = bench.ok(two, three)
    bench.ok(bench.create("c", seed=run_spec("a").seed), bench.fb("c", FIRST))
    same, step = bench.fb("c", SECOND), bench.optim("c")
    expected = bench.ok(same, step)
    np.testing.assert_array_equal(output(found[two.op_id])[0][0], output(expected[same.op_id])[0][0])
    assert found[three.op_id].payload == expected[step.op_id].payload


def test_a_full_disk_fails_no_save(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ok(bench.create("a"), bench.fb("a", FIRST), bench.optim("a"))
    new_folder = bench.blobs.new_folder

    def full(ref: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.blobs, "new_folder", full)
    save, after = bench.op("a", OpKind.SAVE_STATE, target_ref="w/1"), bench.fb("a", SECOND)
    assert bench.go(save, after) == {}
    assert [aside.kept for aside in asides(bench)] == [True]
    monkeypatch.setattr(bench.blobs, "new_folder", new_folder)
    bench.ok(save, after)


@pytest.mark.parametrize("kind", sorted(SAVES))
def test_a_disk_that_takes_only_a_part_of_a_file_fails_no_save(bench: Bench, kind: OpKind) -> None:
    bench.ok(bench.create("a"), bench.fb("a", FIRST), bench.optim("a"))
    external = kind is OpKind.SAVE_EXTERNAL
    save = save_external(bench, "a", "w/1") if external else bench.op("a", kind, target_ref="w/1")
    after = bench.fb("a", SECOND)
    with files_of_at_most(1000):
        assert bench.go(save, after) == {}
    assert [(aside.kept, aside.lasting) for aside in asides(bench)] == [(True, False)]
    bench.ok(save, after)
