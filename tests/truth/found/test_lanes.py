"""Faults that the model has found in the order and the rebuilding of runs, each as a plain test."""

from __future__ import annotations

from tests.scheduler.order.test_lanes import created, op, sent


def test_a_run_that_is_set_aside_while_it_is_rebuilt_is_rebuilt_whole() -> None:
    """When the server died, operation 2 was answered, but 1 was not. During the rebuild the trainer cannot read 1 for a
    moment, and keeps the run as it was before 1: without 2, which must be replayed again after 1."""
    lane = created()
    backward, step = op(1), op(2, "optim_step")
    lane.arrive(backward), lane.arrive(step)
    lane.answered(step, ok=True)
    assert sent(lane.lost()) == [
        (0, "create", True),
        (1, "forward_backward", False),
        (2, "optim_step", True),
    ]
    lane.pause("the disk does not answer", kept=True)
    assert [(seq, replay) for seq, _, replay in sent(lane.resume()) if seq] == [(1, False), (2, True)]
