"""A step after a forward_backward that failed, in the same pass or an earlier one, is not taken."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.runs import step_not_taken

from scheduler.links.messages import Failure, OpKind, TrainOp
from tests.workers.trainer.kit import Bench, arenas, ce_data, replayed


def overflowing(bench: Bench) -> TrainOp:
    targets, weights = np.arange(4), np.full(4, 3e38, np.float32)
    return bench.fb("r", [ArrayDatum(np.arange(4, dtype=np.int32), {"target_tokens": targets, "weights": weights})])


def begun(bench: Bench) -> list[torch.Tensor]:
    """A run with momentum and a gradient; its arenas."""
    bench.ok(bench.create("r"), bench.fb("r", ce_data([9], seed=1)), bench.optim("r"))
    bench.ok(bench.fb("r", ce_data([7], seed=2)))
    return [part.clone() for part in arenas(bench.run("r"))]


def assert_missing(failure: Failure | None) -> None:
    assert failure is not None
    assert failure.category == "user"
    assert not failure.ran
    assert failure.message.startswith("no step was taken: a forward_backward before it failed")


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_with_a_missing_gradient_is_not_taken_and_the_next_one_is(bench: Bench, passes: int) -> None:
    before = begun(bench)
    bad, step = overflowing(bench), bench.optim("r")
    dones = bench.go(bad, step) if passes == 1 else bench.go(bad) | bench.go(step)
    assert dones[bad.op_id].failure is not None
    assert_missing(dones[step.op_id].failure)
    for was, now in zip(before, arenas(bench.run("r")), strict=True):
        assert torch.equal(was, now)
    bench.ok(bench.optim("r"))
    assert bench.run("r").step == 2


def test_a_client_that_knows_of_the_failure_may_go_on(bench: Bench) -> None:
    begun(bench)
    bad = overflowing(bench)
    bench.go(bad)
    bench.ok(bench.fb("r", ce_data([5], seed=3)), bench.optim("r", knows=bad.seq))


def test_a_failure_that_only_the_journal_knows_counts_too(bench: Bench) -> None:
    begun(bench)
    step = msgspec.structs.replace(bench.optim("r"), lacks=(2, step_not_taken("forward_backward", "token 9 is out")))
    failure = bench.go(step)[step.op_id].failure
    assert_missing(failure)
    assert failure is not None
    assert failure.message.endswith("token 9 is out")


def test_a_step_on_loaded_weights_is_taken(bench: Bench) -> None:
    begun(bench)
    saved = bench.op("r", OpKind.SAVE_STATE, target_ref="weights/saved")
    bench.ok(saved)
    bench.go(overflowing(bench))
    bench.ok(bench.op("r", OpKind.LOAD_STATE, source_ref="weights/saved", with_optimizer=True), bench.optim("r"))


def test_a_replay_is_what_it_was(bench: Bench) -> None:
    """A step that is repeated was taken before; that something before it now fails does not change that."""
    begun(bench)
    bench.go(overflowing(bench), replayed(bench.optim("r")))
    assert bench.run("r").step == 2
