"""A run's results have the same bits: alone or in a crowd, in one slice or many, at once or over passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.links.messages import OpKind
from tests.workers.trainer.kit import Bench, arenas, ce_data, output, rl_data, sliced

LENGTHS = {"a": [7, 30, 7, 1], "b": [21], "c": [3, 3, 60, 2, 9], "d": [16, 16]}
RANKS = {"a": 4, "b": 1, "c": 16, "d": 7}
TARGETS = {"b": {"train_mlp": False}, "d": {"train_attn": False, "train_unembed": False}}


def data(run: str, step: int):
    make = rl_data if run in "bc" else ce_data
    lengths = LENGTHS[run][step % 2 :] or LENGTHS[run]
    return make(lengths, seed=1000 * step + ord(run))


def loss(run: str) -> str:
    return {"b": "ppo", "c": "cispo"}.get(run, "cross_entropy")


def train(bench: Bench, runs: str, steps: int = 4) -> dict[str, list[np.ndarray]]:
    """Train all runs together; returns the logprobs of every step by run."""
    bench.ok(*(bench.create(run, RANKS[run], **TARGETS.get(run, {})) for run in runs))
    seen: dict[str, list[np.ndarray]] = {run: [] for run in runs}
    for step in range(steps):
        works = {run: bench.fb(run, data(run, step), loss(run)) for run in runs}
        done = bench.ok(*works.values(), *(bench.optim(run, learning_rate=0.01 * (1 + ord(run) % 3)) for run in runs))
        for run, op in works.items():
            seen[run] += output(done[op.op_id])[0]
    return seen


def assert_same_state(one: Bench, other: Bench, run: str) -> None:
    for x, y in zip(arenas(one.run(run)), arenas(other.run(run)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("crowd", ["abcd", "dcba", "ca", "bda"])
@pytest.mark.parametrize("cap", [4096, 40])
def test_alone_equals_crowded(make_bench, crowd: str, cap: int) -> None:
    crowded_bench = make_bench(microbatch_tokens=cap)
    crowded = train(crowded_bench, crowd)
    for run in crowd:
        alone_bench = make_bench(microbatch_tokens=cap)
        alone = train(alone_bench, run)
        for x, y in zip(alone[run], crowded[run], strict=True):
            assert np.array_equal(x, y)
        assert_same_state(alone_bench, crowded_bench, run)


def test_slices_over_several_passes_equal_slices_in_one(make_bench) -> None:
    worlds = make_bench(), make_bench()
    dones = []
    for spread, bench in enumerate(worlds):
        bench.ok(bench.create("a"), bench.create("n", 9))
        whole = bench.fb("a", ce_data([9, 30, 4, 11, 25], seed=5))
        slices = sliced(whole, 1, 3)
        if spread:
            for i, part in enumerate(slices[:-1]):
                bench.ok(part, bench.fb("n", rl_data([5 * i + 3], seed=i), "importance_sampling"))
            dones.append(bench.ok(slices[-1])[whole.op_id])
        else:
            dones.append(bench.ok(*slices)[whole.op_id])
        bench.ok(bench.optim("a"))
    assert dones[0].payload == dones[1].payload
    assert dones[0].facts == {"tokens": 79}
    assert_same_state(*worlds, "a")


def test_a_long_operation_gives_the_same_in_any_microbatch(make_bench) -> None:
    """The trainer's own cuts equal slices at the same points."""
    worlds = make_bench(microbatch_tokens=40), make_bench(microbatch_tokens=40)
    payloads = []
    for pre_cut, bench in enumerate(worlds):
        bench.ok(bench.create("a"))
        whole = bench.fb("a", ce_data([30, 10, 35, 50, 4], seed=5))
        done = bench.ok(*(sliced(whole, 2, 3, 4) if pre_cut else [whole]), bench.optim("a"))
        payloads.append(done[whole.op_id].payload)
    assert payloads[0] == payloads[1]
    assert_same_state(*worlds, "a")


def test_two_operations_add_up_to_one_with_all_data(make_bench) -> None:
    everything = ce_data([12, 5, 33, 8], seed=2)
    one, two = make_bench(), make_bench()
    one.ok(one.create("a"), one.fb("a", everything))
    two.ok(two.create("a"), two.fb("a", everything[:1]), two.fb("a", everything[1:]))
    torch.testing.assert_close(one.run("a").grad.flat, two.run("a").grad.flat, atol=1e-5, rtol=1e-4)


def test_metrics_of_slices_equal_those_of_the_whole(make_bench) -> None:
    metrics = []
    for points in ([], [1, 2]):
        bench = make_bench()
        bench.ok(bench.create("a"))
        op = bench.fb("a", rl_data([12, 5, 33], seed=2), "ppo")
        metrics.append(output(bench.ok(*sliced(op, *points))[op.op_id])[1])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)
    assert {"loss:sum", "clip_fraction:mean", "mismatch_kl:mean", "e_max_violation:max"} <= metrics[0].keys()


def test_forward_equals_forward_backward_and_changes_nothing(bench: Bench) -> None:
    bench.ok(bench.create("a"))
    data = rl_data([9, 14], seed=1)
    forward = bench.fb("a", data, "ppo", kind=OpKind.FORWARD)
    done = bench.ok(forward)
    assert bench.run("a").grad is None
    backward = bench.fb("a", data, "ppo")
    assert bench.ok(backward)[backward.op_id].payload == done[forward.op_id].payload
