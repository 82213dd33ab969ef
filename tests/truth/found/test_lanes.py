"""What the model has found in the order and the rebuilding of runs, each as a plain test."""

from __future__ import annotations

from tests.scheduler.order.test_lanes import created, op, sent


def test_a_run_that_is_set_aside_while_it_is_rebuilt_is_rebuilt_whole() -> None:
    """Operation 1 was not answered when the server died, 2 was. On the way back the trainer cannot read 1 for a moment,
    and holds the run as it was before it: without 2, which must come again behind 1."""
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
