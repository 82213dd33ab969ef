"""`weftd serve` whose trainers wait instead of computing: for each stage of a pass as long as `TIMES` says.

    python bench/parts/waiting_trainers.py serve ...

All else is the real program: passes are read, bodies decoded and checked, runs held, saved and moved, optimizer steps
taken (on gradients of 0), and results encoded and told. A trainer that waits uses little of a core, so that a small
machine carries several, and what it then shows of queues, placing and passes does not depend on how fast it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from scheduler.links.messages import TrainOp
from scheduler.simulator.cluster import Cluster
from workers import __main__ as workers
from workers.leave import leave
from workers.model.decoder import Decoder
from workers.trainer import computing, process
from workers.trainer.progress import Part
from workers.trainer.runs.held import Send
from workers.trainer.trainer import Trainer

PASS_TOKENS = 512
#: Speeds of a trainer of one rank. A full pass takes about 0.8 s, long compared with the work of clients and server for
#: it.
TIMES = Cluster(
    replicas=1,
    gpus_per_replica=1,
    slots=1,
    ranks=1,
    pass_tokens=PASS_TOKENS,
    pass_s=0.1,
    slice_s=0.012,
    light_s=0.008,
    trained_tokens_per_s_per_gpu=1000.0,
    pair_s=3e-6,
)


class Waiting(Trainer):
    """A trainer whose messages of a stage are sent when the stage's time is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waited_for: list[Part] = []
        computing.run_microbatch = self._leave_out  # type: ignore[attr-defined, assignment]

    def _leave_out(self, _decoder: Decoder, parts: Sequence[Part], *, trains: bool) -> None:
        """Replaces `run_microbatch`: log-probabilities of 0, and no gradient."""
        for part in parts:
            shapes = [datum.inputs["target_tokens"].shape for datum in part.data]
            outputs = [{"logprobs": np.zeros(shape, np.float32)} for shape in shapes]
            part.progress.add(part, outputs, {}, torch.zeros(0, 1, dtype=torch.int64))
        self._waited_for += parts

    def _compute(self, ops: list[TrainOp], send: Send) -> int:
        self._waited_for.clear()
        with lasting(send) as (told, takes):
            tokens = super()._compute(ops, told)
            pairs = sum(len(datum.tokens) ** 2 for part in self._waited_for for datum in part.data)
            computed = sum(part.tokens for part in self._waited_for)
            takes(TIMES.pass_takes_s(computed, stages=bool(ops), slices=len(ops), pairs=pairs))
        return tokens

    def _step(self, ops: list[TrainOp], send: Send) -> None:
        with lasting(send) as (told, takes):
            super()._step(ops, told)
            takes(len(ops) * TIMES.light_s)


@contextmanager
def lasting(send: Send) -> Iterator[tuple[Send, Callable[[float], None]]]:
    """Messages sent in the block are held back until the given time has passed since its beginning."""
    began, told, times = time.monotonic(), list[Struct](), list[float]()
    yield lambda *messages: told.extend(messages), times.append
    time.sleep(max(0.0, began + sum(times) - time.monotonic()))
    if told:
        send(*told)


def serve(arguments: Sequence[str]) -> None:
    from api import cli
    from api.server.workers import worker_programs
    from api.server.workers.worker_process import WorkerProgram
    from scheduler.links.configs import WorkerConfig

    program = worker_programs._program

    def programmed(role: str, config: WorkerConfig) -> WorkerProgram:
        made, command = program(role, config), [sys.executable, __file__, "trainer"]
        return replace(made, command=command, forked=False) if role.startswith("trainer") else made

    worker_programs._program = programmed
    sys.argv = ["weftd", *arguments]
    cli.main()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        process.Trainer = Waiting  # type: ignore[attr-defined, assignment]
        leave(workers.main(sys.argv[1:]))
    else:
        serve(sys.argv[1:])
