"""The processor time of a pass, for a trainer in this process with one thread."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from bench.parts.passes import STEP, execute, random_batch
from bench.parts.trained_loads import RANK, TENANTS, Load
from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import OpKind, Pass, RunSpec, TrainOp
from scheduler.order.compose import compose
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.light_work import cost_of
from scheduler.order.operations import Operation
from scheduler.order.plans import BODY_ONLY, ForwardBackward, Plan, Slice
from scheduler.simulator.trainer import Work, stages_of
from store.blobs.folder import FolderBlobs
from workers.model.decoder import Decoder
from workers.trainer.trainer import Trainer

MODEL = "model"
_NOW = datetime.now(UTC)


class Passes:
    """The first pass that the service composes from what all clients of a load have in flight."""

    def __init__(self, decoder: Decoder, folder: Path, pass_tokens: int) -> None:
        self._pass_tokens, self._count, self._vocab = pass_tokens, 0, decoder.config.vocab_size
        bounds = TrainerBounds(snapshot_every_tokens=1 << 40)
        self._trainer = Trainer({MODEL: decoder}, FolderBlobs(folder), bounds)
        self._specs = [RunSpec(f"run-{i}", MODEL, RANK, 32.0, i, True, True, True) for i in range(TENANTS)]
        for spec in self._specs:
            self._execute([TrainOp(f"create-{spec.run_id}", spec.run_id, 0, OpKind.CREATE, spec=spec)])

    def timed(self, load: Load) -> Work:
        units = self._units(load)
        work, data = Work(passes=1), dict(enumerate(load.batches))
        for stage in stages_of(units):
            work.add(Work.of_stage(stage, lambda unit: _pairs(unit, data)))
        began = time.process_time()
        self._execute([unit.send for unit in units])
        work.seconds = time.process_time() - began
        return work

    def _units(self, load: Load) -> list[Unit]:
        queue: FairTree[Unit] = FairTree()
        for number, (sequences, length) in enumerate(load.batches):
            lane = RunLane(f"org-{number}", self._specs[number])
            lane.resident = True
            for _ in range(load.in_flight):
                for _ in range(load.backwards):
                    plan = ForwardBackward((Slice(0, sequences, sequences * length),))
                    body = random_batch(self._vocab, [length] * sequences, number)
                    self._queue(queue, lane, OpKind.FORWARD_BACKWARD, plan, body)
                self._queue(queue, lane, OpKind.OPTIM_STEP, BODY_ONLY, STEP)
        return compose(queue, [MODEL], self._pass_tokens)

    def _queue(self, queue: FairTree[Unit], lane: RunLane, kind: OpKind, plan: Plan, body: bytes) -> None:
        self._count += 1
        tokens = sum(part.tokens for part in plan.slices) if isinstance(plan, ForwardBackward) else 0
        name, org = f"op-{self._count}", lane.org_id
        op = Operation(name, org, org, lane.run_id, lane.next_seq, kind, MODEL, tokens, "", plan, _NOW)
        op.body, op.body_sha256 = body, hashlib.sha256(body).hexdigest()
        for unit in lane.arrive(op):
            queue.push(lane.path, unit, cost_of(unit, lane.spec, None))

    def _execute(self, ops: list[TrainOp]) -> None:
        execute(self._trainer, Pass(self._count, MODEL, ops))


def _pairs(unit: Unit, data: Mapping[int, tuple[int, int]]) -> int:
    sequences, length = data[int(unit.send.run_id.removeprefix("run-"))]
    return sequences * length**2 * (not unit.light)


def costs(decoder: Decoder, folder: Path, loads: Mapping[str, Load], pass_tokens: int, rounds: int) -> dict[str, Work]:
    """The cost of a pass for each load. Loads take turns, after a round that does not count. A load's share of its
    round does not depend on the machine's speed then: the result is its median share, times the median round."""
    torch.set_num_threads(1)
    passes = Passes(decoder, folder, pass_tokens)
    turns = [{name: passes.timed(load) for name, load in loads.items()} for _ in range(rounds + 1)][1:]
    whole_s = [sum(work.seconds for work in turn.values()) for turn in turns]
    found = {}
    for name, work in turns[0].items():
        parts = [turn[name].seconds / all_s for turn, all_s in zip(turns, whole_s, strict=True)]
        found[name] = replace(work, seconds=median(parts) * median(whole_s))
    return found
