"""One loop at a time may train a run: gradients add up on the run until the next step, whichever loop takes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import WeftError
from weft.rl import checks
from weft.training_client import TrainingClient

_lock = threading.Lock()
_trained = set[int]()  # ids of runs being trained; an id lives as long as its loop


@contextmanager
def alone(run: TrainingClient) -> Iterator[None]:
    """Mark `run` as trained by this loop for the block. Raises WeftError if another loop of this process already trains
    it, in any thread; TypeError if it is no run."""
    checks.does("run", run, "get_info_async", "service.create_lora_training_client(...)")
    with _lock:
        if id(run) in _trained:
            raise WeftError(
                "another loop trains this run, and a step of either would take the gradients of both: wait for its end,"
                " or give each loop a run of its own"
            )
        _trained.add(id(run))
    try:
        yield
    finally:
        with _lock:
            _trained.discard(id(run))
