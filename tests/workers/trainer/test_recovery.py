"""Checkpoints, snapshots and replay: a run comes back with the bits that it had, whichever way."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from scheduler.links.messages import HandedOver, OpKind, Snapshot, TrainOp
from tests.workers.trainer.kit import Bench, arenas, ce_data, replayed, sliced


def step(bench: Bench, run: str, seed: int):
    return [bench.fb(run, ce_data([9, 4], seed=seed)), bench.optim(run, weight_decay=0.1)]


def save(bench: Bench, run: str, ref: str, kind: OpKind = OpKind.SAVE_STATE):
    return bench.op(run, kind, target_ref=ref)


def load(bench: Bench, run: str, ref: str, with_optimizer: bool = True):
    return bench.op(run, OpKind.LOAD_STATE, source_ref=ref, with_optimizer=with_optimizer)


def copies(bench: Bench, run: str = "a"):
    return [x.clone() for x in arenas(bench.run(run))]


def assert_equal(before, bench: Bench, run: str = "a") -> None:
    for x, y in zip(before, arenas(bench.run(run)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("way", ["load in place", "create from it", "another process"])
def test_load_and_go_on_equals_never_stopping(bench: Bench, way: str) -> None:
    saving = [bench.create("a"), *step(bench, "a", 1), *step(bench, "a", 2), save(bench, "a", "w/x")]
    done = bench.ok(*saving)[saving[-1].op_id]
    assert done.facts["size_bytes"] == bench.blobs.size_bytes("w/x") > 12 * bench.run("a").adapter.shape.num_parameters
    bench.ok(*step(bench, "a", 3))
    wanted = copies(bench)
    if way == "load in place":
        bench.ok(load(bench, "a", "w/x"))
        run = "a"
    else:
        if way == "another process":
            bench.restart()
        bench.ok(bench.create("b", source_ref="w/x", with_optimizer=True))
        run = "b"
    bench.ok(*step(bench, run, 3))
    assert_equal(wanted, bench, run)
    assert bench.run(run).step == 3


def test_without_optimizer_the_moments_start_again(bench: Bench) -> None:
    bench.ok(bench.create("a"), *step(bench, "a", 1), save(bench, "a", "w/x"))
    weights = bench.run("a").adapter.flat.clone()
    bench.ok(*step(bench, "a", 2), load(bench, "a", "w/x", with_optimizer=False))
    run = bench.run("a")
    assert torch.equal(run.adapter.flat, weights)
    assert not run.m.any()
    assert not run.v.any()
    assert run.step == 0


def test_a_save_does_not_hold_the_accumulated_gradient_and_does_not_lose_it(bench: Bench) -> None:
    bench.ok(bench.create("a"), *step(bench, "a", 1), bench.fb("a", ce_data([5], 7)), save(bench, "a", "w/x"))
    assert bench.run("a").grad is not None
    bench.ok(load(bench, "a", "w/x"))
    assert bench.run("a").grad is None


def test_sampler_weights_hold_the_adapter_only(bench: Bench) -> None:
    bench.ok(bench.create("a"), *step(bench, "a", 1), save(bench, "a", "s/x", OpKind.SAVE_SAMPLER))
    weights = bench.run("a").adapter.flat.clone()
    bench.ok(bench.create("b", source_ref="s/x"))
    assert torch.equal(bench.run("b").adapter.flat, weights)
    refused = load(bench, "a", "s/x")
    failure = bench.go(refused)[refused.op_id].failure
    assert failure.category == "user"
    assert "no optimizer state" in failure.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"rank": 8}, "LoRA rank 4, the run 8"), ({"train_mlp": False}, "train_mlp"), ({"alpha": 4.0}, "alpha 8.0")],
)
def test_a_checkpoint_of_another_shape_is_refused_by_name(bench: Bench, changes, words: str) -> None:
    bench.ok(bench.create("a"), save(bench, "a", "w/x"), bench.create("b", **changes))
    before = copies(bench, "b")
    refused = load(bench, "b", "w/x")
    failure = bench.go(refused)[refused.op_id].failure
    assert (failure.category, words in failure.message) == ("user", True)
    assert_equal(before, bench, "b")


def test_a_missing_checkpoint_names_no_path_of_this_machine(bench: Bench) -> None:
    bench.ok(bench.create("a"))
    refused = load(bench, "a", "w/none")
    failure = bench.go(refused)[refused.op_id].failure
    assert failure.category == "user"
    assert str(bench.blobs.root) not in failure.message


def test_replay_rebuilds_the_same_bits_and_says_nothing(bench: Bench) -> None:
    history = [bench.create("a", 5), *step(bench, "a", 1), *step(bench, "a", 2), bench.fb("a", ce_data([30], 3))]
    bench.ok(*history)
    wanted, grad = copies(bench), bench.run("a").grad.flat.clone()
    bench.restart()
    assert bench.go(*map(replayed, history)) == {}
    assert_equal(wanted, bench)
    assert torch.equal(bench.run("a").grad.flat, grad)


def test_snapshot_after_enough_tokens_then_replay_of_the_rest(make_bench) -> None:
    bench = make_bench(snapshot_every_tokens=20)
    history = [bench.create("a"), *step(bench, "a", 1), *step(bench, "a", 2), *step(bench, "a", 3)]
    bench.ok(*history)
    assert bench.snapshots == [Snapshot("a", 4, "runs/a/state-4")]
    wanted = copies(bench)
    bench.restart()
    restore = msgspec.structs.replace(
        history[0], op_id="restore-a", seq=4, replay=True, source_ref="runs/a/state-4", with_optimizer=True
    )
    assert bench.go(restore, *map(replayed, history[5:])) == {}
    assert_equal(wanted, bench)
    assert bench.run("a").step == 3
    assert len(bench.snapshots) == 1


def test_what_came_from_a_checkpoint_is_snapshot_at_once(bench: Bench) -> None:
    """The owner may delete the source at any time."""
    bench.ok(bench.create("a"), save(bench, "a", "w/x"), bench.create("b", source_ref="w/x"))
    assert [s.run_id for s in bench.snapshots] == ["b"]
    bench.ok(load(bench, "a", "w/x"))
    assert [s.run_id for s in bench.snapshots] == ["b", "a"]


def test_drain_snapshots_changed_runs(bench: Bench) -> None:
    bench.ok(bench.create("fresh"), bench.create("stepped"), bench.create("midway"))
    bench.ok(*step(bench, "stepped", 1), *step(bench, "midway", 1), bench.fb("midway", ce_data([5], 1)))
    sent: list[Snapshot] = []
    bench.trainer.drain(sent.append)
    assert sent == [
        Snapshot("stepped", 2, "runs/stepped/state-2"),
        Snapshot("midway", 3, "runs/midway/state-3"),
    ]
    bench.trainer.drain(sent.append)
    assert len(sent) == 2


def test_release_forgets(bench: Bench) -> None:
    bench.ok(bench.create("a"))
    assert bench.go(release=["a", "never seen"]) == {}
    assert bench.trainer.held.runs == {}


def test_the_same_seed_gives_the_same_adapter(bench: Bench) -> None:
    bench.ok(bench.create("a", seed=5), bench.create("b", seed=5), bench.create("c", seed=6))
    assert torch.equal(bench.run("a").adapter.flat, bench.run("b").adapter.flat)
    assert not torch.equal(bench.run("a").adapter.flat, bench.run("c").adapter.flat)


def test_optim_step_without_gradient_is_a_zero_gradient_step(bench: Bench) -> None:
    bench.ok(bench.create("a"))
    op = bench.optim("a")
    payload = msgspec.json.decode(bench.ok(op)[op.op_id].payload)
    assert payload["metrics"]["grad_norm:mean"] == 0.0
    assert bench.run("a").step == 1


@pytest.mark.parametrize("optim", [Bench.optim, Bench.dimuon], ids=["adamw", "dimuon"])
def test_steps_with_and_without_gradients_in_one_pass_are_those_of_runs_alone(
    bench: Bench, optim: Callable[..., TrainOp]
) -> None:
    optimizer = "dimuon" if optim is Bench.dimuon else "adamw"
    ranks = {"small": 2, "large": 8, "trained": 4, "other": 4}
    for name, rank in ranks.items():
        for run_id in (f"{name}-alone", f"{name}-together"):
            bench.ok(bench.create(run_id, rank, seed=rank, optimizer=optimizer), bench.fb(run_id, ce_data([9, 5], 3)))
            bench.ok(optim(bench, run_id))
            if name == "trained":
                bench.ok(bench.fb(run_id, ce_data([7], 4)))
    for name in ranks:
        bench.ok(optim(bench, f"{name}-alone", grad_clip_norm=1e-9))
    bench.ok(*(optim(bench, f"{name}-together", grad_clip_norm=1e-9) for name in ranks))
    for name in ranks:
        alone, together = bench.run(f"{name}-alone"), bench.run(f"{name}-together")
        assert torch.equal(alone.adapter.flat, together.adapter.flat)
        assert torch.equal(alone.m, together.m)
        assert torch.equal(alone.v, together.v)


def test_a_run_that_is_handed_over_goes_on_elsewhere_bitwise_also_amid_an_operation(bench: Bench) -> None:
    """Its gradient, moments and the slices that are done go along; a run that stays notices nothing."""
    whole = sliced(bench.fb("a", ce_data([9, 7, 5], 4)), 1, 2)
    before = [
        bench.create("a"),
        bench.create("b"),
        *step(bench, "a", 1),
        *step(bench, "b", 1),
        bench.fb("a", ce_data([5], 7)),
    ]
    after = [*whole[1:], bench.optim("a", weight_decay=0.1), *step(bench, "a", 2)]
    history = [*before, whole[0], *after]
    bench.ok(*history)
    wanted, other = copies(bench), copies(bench, "b")
    bench.restart()
    bench.go(*before, whole[0])
    bench.go(hand_over=["a"])
    (told,) = [message for message in bench.sent if isinstance(message, HandedOver)]
    assert told == HandedOver("a")
    taken = bench.snapshots[-1]
    assert (taken.run_id, taken.part_op, taken.part_stop) == ("a", whole[0].op_id, 1)
    assert list(bench.trainer.held.runs) == ["b"]
    assert_equal(other, bench, "b")
    bench.restart()
    restore = msgspec.structs.replace(before[0], replay=True, source_ref=taken.ref, with_optimizer=True, seq=taken.seq)
    bench.ok(restore, *after)
    assert_equal(wanted, bench)


def test_a_run_that_cannot_be_saved_is_not_handed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ok(bench.create("a"), *step(bench, "a", 1))

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("workers.trainer.runs.held.save_snapshot", full)
    bench.go(hand_over=["a", "none"])
    assert [m for m in bench.sent if isinstance(m, HandedOver)] == [HandedOver("a", kept=True), HandedOver("none")]
    bench.ok(*step(bench, "a", 2))
