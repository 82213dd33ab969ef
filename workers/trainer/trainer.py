"""The trainer: holds all runs, in memory or paged out, and executes passes.

A pass is executed in stages. In each stage every run's next operations are taken: first creates, loads and saves one by
one, then the forwards and backwards of all runs packed together, then all optimizer steps that are due in one fused
update. Runs never wait for each other's kind of work longer than a stage, and one run's operations keep their order.
A pass whose runs do not fit in memory together is executed in waves that do.

Invariants: what a run gets does not depend on the other runs in the pass; an operation that fails leaves its run as it
was; nothing is random, so replaying a run's operations rebuilds it bit for bit.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec
import torch

from scheduler.messages import Done, Failure, OpKind, Pass, PassOver, RunSpec, Snapshot, TrainOp
from store.blobs import Blobs
from workers.model.decoder import Decoder
from workers.trainer.computing import Computing
from workers.trainer.custom_losses import CustomLosses
from workers.trainer.external import save_external
from workers.trainer.failures import NotResident, failure_of
from workers.trainer.pages import PageError
from workers.trainer.progress import Progress, begin
from workers.trainer.residency import resident_within, waves
from workers.trainer.state import RunState, StateError, create_run, kind_of, load_run, save_run
from workers.trainer.stepping import step_runs

Send = Callable[[msgspec.Struct], None]
COMPUTE = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)


@dataclass(frozen=True)
class TrainerSettings:
    """`microbatch_tokens` caps what is computed at once: memory grows with it, and beyond some 2k tokens a CPU gets
    slower. After `snapshot_every_tokens` trained tokens a run's state is saved at its next optimizer step, which
    bounds how much a lost trainer has to replay. The states of runs take up to `resident_bytes` of the memory that
    computes, and, where that is a device's, `host_bytes` of the host's; 0: half of what is free at the start."""

    microbatch_tokens: int = 2048
    snapshot_every_tokens: int = 65536
    resident_bytes: int = 0
    host_bytes: int = 0


class Trainer:
    """`models` by the name that passes use, all on one device. Runs that do not fit in memory are in files in
    `pages_dir` (default: beside the blobs). Not thread safe: one pass at a time."""

    def __init__(
        self,
        models: Mapping[str, Decoder],
        blobs: Blobs,
        settings: TrainerSettings | None = None,
        pages_dir: Path | None = None,
    ) -> None:
        self.models, self.blobs, self.settings = dict(models), blobs, settings or TrainerSettings()
        self.runs: dict[str, RunState] = {}
        device = next((decoder.device for decoder in self.models.values()), torch.device("cpu"))
        self.residency = resident_within(
            self.settings.resident_bytes, self.settings.host_bytes, pages_dir or blobs.root.with_name("pages"), device
        )
        self._open: dict[str, Progress] = {}  # operations with slices still to come, by run
        self._custom_losses = CustomLosses(blobs)

    def execute(self, pass_: Pass, send: Send) -> None:
        """Execute a pass; `send` gets a Done for each operation as soon as it is finished, Snapshots when due, and
        PassOver at the end. An error of `send` (the server is gone) ends the pass."""
        began, tokens = time.monotonic(), 0
        for run_id in pass_.release:
            self._forget(run_id)
        queues: dict[str, deque[TrainOp]] = {}
        for op in pass_.ops:
            queues.setdefault(op.run_id, deque()).append(op)
        for wave in self._waves(queues, pass_.soon):
            tokens += self._stages({run_id: queues[run_id] for run_id in wave}, send)
            for run_id in wave:
                if (progress := self._open.get(run_id)) is not None:
                    progress.park()
        send(PassOver(pass_.pass_id, tokens, len(queues), time.monotonic() - began))

    def _waves(self, queues: dict[str, deque[TrainOp]], soon: list[str]) -> Iterator[list[str]]:
        """The runs of the pass in sets that fit in memory, each on its way when it is given out, and the next behind
        it; behind the last one the runs of the next pass. Those that are here come first: what they compute hides how
        long the others take to come."""
        here_first = sorted(queues, key=lambda run_id: not self.residency.is_here(run_id))
        sizes = {run_id: self._size(queues[run_id][0]) for run_id in here_first}
        sets = waves(sizes, self.residency.budget_bytes)
        for wave, next_wave in zip(sets, [*sets[1:], soon], strict=False):
            order = [*wave, *self._fitting(next_wave, beside=sum(sizes[run_id] for run_id in wave))]
            self.residency.hold(order)
            for run_id in order:
                if (run := self.runs.get(run_id)) is not None:
                    self.residency.fetch(run)
            yield wave
        self.residency.hold([])

    def _fitting(self, run_ids: list[str], beside: int) -> list[str]:
        """As many of these runs as fit in memory beside so many bytes."""
        room = self.residency.budget_bytes - beside
        sizes = [self.runs[run_id].kind.size_bytes if run_id in self.runs else 0 for run_id in run_ids]
        return [run_id for run_id, total in zip(run_ids, accumulate(sizes), strict=True) if total <= room]

    def _size(self, op: TrainOp) -> int:
        """Bytes of memory that the run of `op` takes, or, if it is to be created, will take."""
        run, spec = self.runs.get(op.run_id), op.spec
        if run is not None:
            return run.kind.size_bytes
        try:
            return kind_of(spec, self._decoder(spec).config).size_bytes if spec is not None else 0
        except (StateError, NotResident, ValueError):
            return 0  # the operation will fail

    def _stages(self, queues: dict[str, deque[TrainOp]], send: Send) -> int:
        """Execute the operations of some runs. Returns the tokens computed."""
        tokens = 0
        while queues:
            for queue in queues.values():
                while queue and queue[0].kind not in (*COMPUTE, OpKind.OPTIM_STEP):
                    self._alone(queue.popleft(), send)
            tokens += self._compute(_leading(queues, COMPUTE), send)
            self._step(_leading(queues, (OpKind.OPTIM_STEP,), at_most=1), send)
            queues = {run_id: queue for run_id, queue in queues.items() if queue}
        return tokens

    def drain(self, send: Send) -> None:
        """Snapshot every changed run. A run with a gradient accumulated keeps its older snapshot: the journal replays
        what came after it."""
        for run in sorted(self.runs.values(), key=lambda run: not self.residency.is_here(run.spec.run_id)):
            if run.unsaved and not run.has_grad:
                self.residency.hold([run.spec.run_id])
                self.residency.need(run)
                self._snapshot(run, send)

    def _forget(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self._open.pop(run_id, None)
        self.residency.forget(run_id)

    def _abandon(self, run_id: str) -> None:
        """Whatever operation of the run has slices to come, it will get none: another one has come instead."""
        progress = self._open.pop(run_id, None)
        if progress is not None:
            self._bring(progress.run)
            progress.abandon()

    def _bring(self, run: RunState) -> None:
        """Return when the run is in memory, and its open operation has its gradient."""
        self.residency.need(run)
        progress = self._open.get(run.spec.run_id)
        if progress is not None:
            progress.resume()

    def _alone(self, op: TrainOp, send: Send) -> None:
        """Create, load or save."""
        self._abandon(op.run_id)
        facts: dict[str, int] = {}
        failure = None
        if (there := self.runs.get(op.run_id)) is not None:
            self._bring(there)
        try:
            if op.kind is OpKind.CREATE:
                self._create(op)
            elif op.kind is OpKind.LOAD_STATE:
                self._load(op)
            elif op.kind is OpKind.SAVE_EXTERNAL:
                body = self.blobs.get(op.body_ref)
                facts["size_bytes"] = save_external(self._run(op), self.blobs, op.target_ref, body)
            else:
                facts["size_bytes"] = save_run(
                    self._run(op), self.blobs, op.target_ref, with_optimizer=op.kind is OpKind.SAVE_STATE
                )
        except Exception as error:
            failure = failure_of(error)
        run = self.runs.get(op.run_id)
        if run is not None:
            facts["version"] = run.step
        _answer(op, send, b"", facts, failure)
        if failure is None and not op.replay and run is not None and run.unsaved and op.source_ref:
            # The source may be deleted by its owner: from here on the run must not need it.
            self._snapshot(run, send)

    def _create(self, op: TrainOp) -> None:
        spec = op.spec
        if spec is None:
            raise NotResident(f"create operation {op.op_id} carries no run specification")
        decoder = self._decoder(spec)
        fresh = not op.source_ref
        run = create_run(spec, decoder.config, self.residency.take) if fresh else self._load_run(spec, op)
        run.last_seq = op.seq
        run.unsaved = not fresh and not op.replay
        self._add(run)

    def _load(self, op: TrainOp) -> None:
        run = self._load_run(self._run(op).spec, op)
        run.last_seq, run.unsaved = op.seq, True
        self._add(run)

    def _add(self, run: RunState) -> None:
        self.residency.add(run)
        self.runs[run.spec.run_id] = run

    def _load_run(self, spec: RunSpec, op: TrainOp) -> RunState:
        config = self._decoder(spec).config
        return load_run(spec, config, self.residency.take, self.blobs, op.source_ref, with_optimizer=op.with_optimizer)

    def _compute(self, ops: list[TrainOp], send: Send) -> int:
        """The forwards and backwards of a stage, packed. Returns the tokens computed."""
        computing = Computing(self.settings.microbatch_tokens, self._bring, self.residency.squeeze)
        for op in ops:
            progress = self._open.get(op.run_id)
            if progress is None or progress.op.op_id != op.op_id:
                if progress is not None and not progress.ended:
                    self._abandon(op.run_id)
                try:
                    progress = self._begin(op)
                except Exception as error:
                    if op.final:
                        _answer(op, send, b"", {}, failure_of(error))
                    continue
                self._open[op.run_id] = progress
            computing.plan(progress, op)
        tokens = 0
        for finished in computing.run(lambda run: self._decoder(run.spec)):
            tokens += finished.tokens
            self._finish(finished, send)
        return tokens

    def _begin(self, op: TrainOp) -> Progress:
        run = self._run(op)
        config = self._decoder(run.spec).config
        progress = begin(op, run, self.blobs.get(op.body_ref), config, self._custom_losses.get)
        # After the check of the body, so that all slices of a bad operation fail for the same reason.
        if op.start:
            raise NotResident(f"a slice of operation {op.op_id} came without those before it")
        return progress

    def _finish(self, progress: Progress, send: Send) -> None:
        op, run = progress.op, progress.run
        self._bring(run)
        if self._open.get(op.run_id) is progress:
            del self._open[op.run_id]
        payload, failure = progress.finish()
        if failure is None and op.kind is OpKind.FORWARD_BACKWARD:
            run.last_seq, run.unsaved = op.seq, True
            run.unsaved_tokens += progress.tokens
        _answer(op, send, payload, {"tokens": progress.tokens}, failure)

    def _step(self, ops: list[TrainOp], send: Send) -> None:
        """All optimizer steps of a stage, in one fused update."""
        due = []
        for op in ops:
            self._abandon(op.run_id)
            try:
                run = self._run(op)
                self._bring(run)
                due.append((op, run, self.blobs.get(op.body_ref)))
            except PageError:
                raise
            except Exception as error:
                _answer(op, send, b"", {}, failure_of(error))
        results = step_runs([(run, body) for _, run, body in due])
        for (op, run, _), result in zip(due, results, strict=True):
            if isinstance(result, Exception):
                _answer(op, send, b"", {}, failure_of(result))
                continue
            run.last_seq, run.unsaved = op.seq, True
            _answer(op, send, result, {"version": run.step}, None)
            if not op.replay and run.unsaved_tokens >= self.settings.snapshot_every_tokens:
                self._snapshot(run, send)

    def _snapshot(self, run: RunState, send: Send) -> None:
        ref = f"runs/{run.spec.run_id}/state-{run.last_seq}"
        try:
            save_run(run, self.blobs, ref, with_optimizer=True)
        except Exception:
            # The older snapshot still holds; the next step tries again.
            traceback.print_exc(file=sys.stderr)
            return
        run.unsaved, run.unsaved_tokens = False, 0
        send(Snapshot(run.spec.run_id, run.last_seq, ref))

    def _run(self, op: TrainOp) -> RunState:
        run = self.runs.get(op.run_id)
        if run is None:
            raise NotResident(f"run {op.run_id} is not on this trainer")
        return run

    def _decoder(self, spec: RunSpec) -> Decoder:
        decoder = self.models.get(spec.base_model)
        if decoder is None:
            raise NotResident(f"this trainer has no base model {spec.base_model!r}; it has {sorted(self.models)}")
        return decoder


def _leading(queues: dict[str, deque[TrainOp]], kinds: tuple[OpKind, ...], at_most: int = sys.maxsize) -> list[TrainOp]:
    """Take from every run the operations of these kinds that are next."""
    taken: list[TrainOp] = []
    for queue in queues.values():
        count = 0
        while queue and queue[0].kind in kinds and count < at_most:
            taken.append(queue.popleft())
            count += 1
    return taken


def _answer(op: TrainOp, send: Send, payload: bytes, facts: dict[str, int], failure: Failure | None) -> None:
    if op.replay and failure is not None:
        print(f"replay of {op.kind} {op.op_id} of run {op.run_id} failed: {failure.message}", file=sys.stderr)
    if not op.replay:
        send(Done(op.op_id, b"" if failure else payload, {} if failure else facts, failure))
