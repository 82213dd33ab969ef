"""Answered operations are replayed even if this version would refuse them: rules change with versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from weft.wire.binary.train_codec import ArrayDatum

from scheduler.links.messages import SetAside
from tests.workers.trainer.kit import Bench, ce_data, replayed, rl_data
from workers.trainer.runs.state import RunState


def asides(bench: Bench) -> list[SetAside]:
    return [message for message in bench.sent if isinstance(message, SetAside)]


def gradient(run: RunState) -> torch.Tensor:
    assert run.grad is not None
    return run.grad.flat


def weighing(weights: Any) -> list[ArrayDatum]:
    [datum] = ce_data([5], seed=1)
    return [ArrayDatum(datum.tokens, {**datum.inputs, "weights": np.float32(weights)})]


@pytest.mark.parametrize(
    ("weight", "eps"), [(1.0, 1e-30), (1e20, 1e-12)], ids=["an eps that is too small", "squares that are no float32"]
)
def test_a_step_is_that_of_torch(bench: Bench, weight: float, eps: float) -> None:
    bench.ok(bench.create("a"), bench.fb("a", weighing([weight] * 5)))
    run = bench.run("a")
    theirs = torch.nn.Parameter(run.adapter.flat.clone())
    theirs.grad = gradient(run).clone()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)
    assert bench.go(replayed(bench.optim("a", eps=eps))) == {}
    optimizer.step()
    assert asides(bench) == []
    assert run.step == 1
    torch.testing.assert_close(run.adapter.flat, theirs.detach(), atol=1e-6, rtol=1e-6)


def test_a_sum_of_gradients_that_is_no_float32(bench: Bench) -> None:
    one = [bench.fb("a", weighing(np.float32(3e37) * np.float32([1, -1, 1, -1, 0]))) for _ in range(8)]
    bench.ok(bench.create("a"), one[0])
    alone = gradient(bench.run("a")).clone()
    assert bench.go(*map(replayed, one[1:])) == {}
    assert asides(bench) == []
    wanted = alone.clone()
    for _ in one[1:]:
        wanted += alone
    assert not wanted.isfinite().all()
    assert torch.equal(gradient(bench.run("a")), wanted)


def test_data_that_this_version_refuses(bench: Bench) -> None:
    [datum] = rl_data([5], seed=1)
    datum.inputs["sequence_ratio_mask"][:] = 0
    bench.ok(bench.create("a"))
    op = bench.fb("a", [datum], "gspo")
    told = bench.go(op)[op.op_id].failure
    assert told is not None
    assert "marks no position" in told.message
    assert bench.go(replayed(op)) == {}
    assert asides(bench) == []
    assert bench.run("a").last_seq == op.seq
