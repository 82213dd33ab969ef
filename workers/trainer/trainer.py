"""The trainer: executes passes over the runs that it holds (`held.py`).

A pass is executed in stages. In each stage every run's next operations are taken: first creates, loads and saves one by
one, then the forwards and backwards of all runs packed together, then all optimizer steps that are due in one fused
update. Runs never wait for each other's kind of work longer than a stage, and one run's operations keep their order.
A pass whose runs do not fit in memory together is executed in waves that do.

Invariants: what a run gets does not depend on the other runs in the pass; an operation that fails leaves its run as it
was; nothing is random, so replaying a run's operations rebuilds it bit for bit. A run whose state could differ from
that is never computed with: it is set aside, and its remaining operations in the pass are left out.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import torch
from weft.wire.checks.losses import CUSTOM, loss_id_of
from weft.wire.checks.runs import step_not_taken

from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import (
    STEPS_COUNT_ON,
    Done,
    Failure,
    InLoss,
    OpKind,
    Pass,
    PassOver,
    RunSpec,
    SetAside,
    TrainOp,
    facts_of,
)
from store import logs, tracing
from store.blobs.ahead import Ahead
from store.blobs.contract import Blobs
from workers.model.decoder import Decoder
from workers.model.memory import with_room
from workers.trainer.computing import Computing, Others
from workers.trainer.failures import GradientMissing, NotResident, cannot_now, cannot_replay, failure_of, may_pass
from workers.trainer.losses.custom import CustomLosses, UploadedLoss, most_work_of
from workers.trainer.packing import leading
from workers.trainer.progress import Part, Progress, begin
from workers.trainer.runs.arena import TakeArena
from workers.trainer.runs.held import HeldRuns, Send, Tell
from workers.trainer.runs.pages import PageError
from workers.trainer.runs.residency import Residency
from workers.trainer.runs.state import RunState, StateError, create_run, kind_of, load_run, save_external, save_run
from workers.trainer.steps.stepping import step_runs
from workers.trainer.watchdog import Limit, no_limit

log = logging.getLogger(__name__)

COMPUTE = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)
#: A replay was computed in time before: it takes long only if this machine is slower.
REPLAY_LIMIT = 10


class Trainer:
    """`models` by the name that passes use, all on one device. Runs that do not fit in memory are in files in
    `pages_dir` (default: beside the blobs). Not thread safe: one pass at a time."""

    def __init__(
        self,
        models: Mapping[str, Decoder],
        blobs: Blobs,
        bounds: TrainerBounds | None = None,
        pages_dir: Path | None = None,
        limit: Limit = no_limit,
        others: Others | None = None,
    ) -> None:
        self.models, self.blobs, self.bounds = dict(models), blobs, bounds or TrainerBounds()
        device = next((decoder.device for decoder in self.models.values()), torch.device("cpu"))
        self.held = HeldRuns(blobs, self.bounds, pages_dir, device)
        self._aside: dict[str, SetAside] = {}  # runs that take no further part in this pass
        self._bodies = Ahead(blobs)
        self._custom_losses = CustomLosses(blobs)
        self.limit, self._others = limit, others
        self._pass_began = datetime.now(UTC)

    @property
    def residency(self) -> Residency:
        return self.held.residency

    @property
    def memory_bytes(self) -> int:
        return self.residency.budget_bytes

    def drain(self, send: Tell) -> None:
        """Snapshot every changed run."""
        self.held.drain(send)

    def execute(self, pass_: Pass, send: Send) -> None:
        """Execute a pass; `send` gets a Done for each operation as soon as it is finished, Snapshots when due, and
        PassOver at the end. An error of `send` (the server is gone) ends the pass."""
        with self.limit(pass_.limit_s or math.inf):
            self._execute(pass_, send)
            if self._others is not None:
                self._others.attend(lambda: deque(self._computing(send).run(self._decoder_of), maxlen=0))

    def _execute(self, pass_: Pass, send: Send) -> None:
        began, tokens, self._pass_began = time.monotonic(), 0, datetime.now(UTC)
        for run_id in pass_.release:
            self.held.forget(run_id)
        for run_id in pass_.hand_over:
            self.held.hand_over(run_id, send)
        unread = (op for op in pass_.ops if op.op_id not in self.held.open)
        self._bodies.fetch((op.body_ref, op.body_sha256) for op in unread)
        queues: dict[str, deque[TrainOp]] = {}
        for op in pass_.ops:
            queues.setdefault(op.run_id, deque()).append(op)
        again = {op.run_id for op in pass_.ops if op.replay or op.again}
        sizes = {run_id: self.size_of(queue[0]) for run_id, queue in queues.items()}
        for wave in self.held.waves(sizes, pass_.soon):
            tokens += self._stages({run_id: queues[run_id] for run_id in wave}, send)
            for run_id in wave:
                self._end_wave(run_id, run_id in again, send)
        send(PassOver(pass_.pass_id, tokens, len(queues), time.monotonic() - began))

    def _end_wave(self, run_id: str, again: bool, send: Send) -> None:
        aside, run = self._aside.pop(run_id, None), self.held.runs.get(run_id)
        if aside is not None:
            if not aside.kept:
                self.held.forget(run_id)
            send(aside)
        elif run is not None and self.held.is_due(run, again):
            self.held.snapshot(run, send)

    def size_of(self, op: TrainOp) -> int:
        """Bytes of memory that the run of `op` takes, or will take once it is created."""
        run, spec = self.held.runs.get(op.run_id), op.spec
        if run is not None:
            return run.kind.size_bytes
        try:
            return kind_of(spec, self._decoder(spec).config).size_bytes if spec is not None else 0
        except (StateError, NotResident, ValueError):
            return 0  # the operation will fail anyway

    def _stages(self, queues: dict[str, deque[TrainOp]], send: Send) -> int:
        """Execute the operations of some runs. Returns the tokens computed."""
        tokens = 0
        while queues:
            for queue in queues.values():
                while queue and queue[0].kind not in (*COMPUTE, OpKind.OPTIM_STEP):
                    self._alone(queue.popleft(), send)
            tokens += self._compute(leading(queues, COMPUTE), send)
            self._step(leading(queues, (OpKind.OPTIM_STEP,), at_most=1), send)
            queues = {run_id: queue for run_id, queue in queues.items() if queue}
        return tokens

    def _failed(self, op: TrainOp, error: Exception, send: Tell) -> None:
        """An operation cannot be executed. If that may pass, the run is set aside and tried again; if a replay fails,
        it is set aside for good, since it would not be the run that was lost. Else the client is told."""
        if may_pass(error):
            self._aside[op.run_id] = SetAside(op.run_id, cannot_now(op, error), kept=not op.replay)
            return
        with logs.on(**facts_of(op)):
            failure = failure_of(error)
        if op.replay:
            self._aside[op.run_id] = SetAside(op.run_id, cannot_replay(op, failure), lasting=True)
        else:
            self._answer(op, send, b"", {}, failure)

    def _ready(self, op: TrainOp, send: Send, *, here: bool = True) -> bool:
        """Give up unfinished operations before `op` and, if it is to be `here`, bring its run into memory. Returns
        False if there is no memory: the run is then set aside."""
        try:
            self.held.abandon(op)
            if here and (run := self.held.runs.get(op.run_id)) is not None:
                self.held.bring(run)
        except OSError as error:
            self._failed(op, error, send)
            return False
        return True

    def _alone(self, op: TrainOp, send: Send) -> None:
        """Execute a create, load or save."""
        if op.run_id in self._aside:
            return
        facts: dict[str, int] = {}
        if not self._ready(op, send):
            return
        try:
            if op.kind is OpKind.CREATE:
                self._create(op)
            elif op.kind is OpKind.LOAD_STATE:
                self._load(op)
            elif op.kind is OpKind.SAVE_EXTERNAL:
                facts["size_bytes"] = save_external(self._run(op), self.blobs, op.target_ref, self._body(op))
            else:
                facts["size_bytes"] = save_run(
                    self._run(op), self.blobs, op.target_ref, with_optimizer=op.kind is OpKind.SAVE_STATE
                )
        except PageError:
            raise
        except Exception as error:
            self._failed(op, error, send)
            return
        run = self._run(op)
        facts["version"] = run.step
        self._answer(op, send, b"", facts, None)
        if not op.replay and run.unsaved and op.source_ref:
            # The owner may delete the source: from here on the run must not need it.
            self.held.snapshot(run, send)

    def _body(self, op: TrainOp) -> bytes:
        return self._bodies.get(op.body_ref, op.body_sha256, op.body)

    def _create(self, op: TrainOp) -> None:
        spec = op.spec
        if spec is None:
            raise NotResident(f"create operation {op.op_id} carries no run specification")
        decoder = self._decoder(spec)
        fresh = not op.source_ref
        with self.residency.taking() as take:
            run = create_run(spec, decoder.config, take) if fresh else self._load_run(spec, op, take)
        run.last_seq = op.seq
        run.saved_seq = op.seq if fresh or op.replay else -1
        self.held.add(run)

    def _load(self, op: TrainOp) -> None:
        with self.residency.taking() as take:
            run = self._load_run(self._run(op).spec, op, take)
        run.last_seq = op.seq
        self.held.add(run)

    def _load_run(self, spec: RunSpec, op: TrainOp, take: TakeArena) -> RunState:
        config = self._decoder(spec).config
        return load_run(spec, config, take, self.blobs, op.source_ref, with_optimizer=op.with_optimizer)

    def _compute(self, ops: list[TrainOp], send: Send) -> int:
        """The forwards and backwards of a stage, packed. Returns the tokens computed."""
        computing = self._computing(send)
        for op in ops:
            if op.run_id in self._aside:
                continue
            progress = self.held.open.get(op.op_id)
            if progress is None:
                if not self._ready(op, send, here=False):
                    continue
                try:
                    progress = self._begin(op)
                except PageError:
                    raise
                except Exception as error:
                    if op.final or may_pass(error):
                        self._failed(op, error, send)
                    continue
                self.held.open[op.op_id] = progress
            self._will_tell(progress, send)
            computing.plan(progress, op)
        tokens = 0
        if self._others is not None:
            self._others.wait()
        for finished in computing.run(self._decoder_of):
            tokens += finished.tokens
            self._finish(finished, send)
        return tokens

    def welcome(self, guest: Progress, send: Send) -> None:
        """Parts of an operation whose run is on another rank are to be computed here."""
        loss_id = loss_id_of(guest.batch.loss_fn_config) if guest.batch.loss_fn == CUSTOM else None
        guest.custom = None if loss_id is None else self._custom_losses.get(loss_id)
        self._will_tell(guest, send)

    def _will_tell(self, progress: Progress, send: Send) -> None:
        if progress.custom is not None:
            progress.in_loss = partial(self._in_loss, progress.custom, send)

    def _computing(self, send: Send) -> Computing:
        left_out = partial(self._left_out, send)
        return Computing(self.bounds.microbatch_tokens, self.held.bring, self.residency.squeeze, left_out, self._others)

    def _left_out(self, send: Send, progress: Progress, error: OSError) -> None:
        """There is no memory for a run whose operation is under way: it waits, and is rebuilt if it has changed."""
        op = progress.op
        if op.run_id not in self._aside:
            kept = self.held.give_up(op.run_id, str(error)) and not op.replay
            self._aside[op.run_id] = SetAside(op.run_id, cannot_now(op, error), kept=kept)

    def _decoder_of(self, run: RunState) -> Decoder:
        return self._decoder(run.spec)

    @contextmanager
    def _in_loss(self, custom: UploadedLoss, send: Send, part: Part) -> Iterator[None]:
        """In the block an uploaded loss is computed. The server is told whose: this process may be ended over it."""
        op = part.progress.op
        limit_s = self.bounds.loss_limit_s * (1 + most_work_of(custom, part.data) / 1024)
        if op.replay:
            with self.limit(REPLAY_LIMIT * limit_s):
                yield
            return
        send(InLoss(op.op_id, part.progress.tokens + part.tokens, limit_s))
        try:
            with self.limit(limit_s):
                yield
        finally:
            send(InLoss())

    def _begin(self, op: TrainOp) -> Progress:
        run = self._run(op)
        config = self._decoder(run.spec).config
        progress = begin(op, run, self._body(op), config, self._custom_losses.get)
        part, run.part = run.part, None
        if part is not None and part.stop == op.start:
            progress.go_on_from(part)
            return progress
        if part is not None:
            run.give_up(part.op_id)
        if op.start:
            # After the check of the body, so that all slices of a bad operation fail for the same reason.
            raise NotResident(f"a slice of operation {op.op_id} came without those before it")
        return progress

    def _finish(self, progress: Progress, send: Send) -> None:
        op, run = progress.op, progress.run
        if op.op_id not in self.held.open:
            return  # its run was left out
        try:
            self.held.bring(run)
            payload, failure = with_room(progress.finish, partial(self.held.make_room, run))
        except OSError as error:
            self._left_out(send, progress, error)
            return
        del self.held.open[op.op_id]
        if failure is not None and op.replay:
            why = cannot_replay(op, failure)
            self._aside.setdefault(op.run_id, SetAside(op.run_id, why, lasting=not progress.unfit))
        if failure is None and op.kind is OpKind.FORWARD_BACKWARD:
            run.last_seq = op.seq
        if op.run_id not in self._aside or self._aside[op.run_id].kept:
            self._answer(op, send, payload, {"tokens": progress.tokens}, failure)

    def _step(self, ops: list[TrainOp], send: Send) -> None:
        """All optimizer steps of a stage, in one fused update where there is memory for it."""
        due = []
        for op in ops:
            if op.run_id in self._aside or not self._ready(op, send, here=False):
                continue
            try:
                run = self._run(op)
                if why := _lacks(op, run):
                    raise GradientMissing(why)
                due.append((op, run, self._body(op)))
            except Exception as error:
                self._failed(op, error, send)
        results = step_runs(due, self.held)
        told = list[msgspec.Struct]()
        for (op, run, _), result in zip(due, results, strict=True):
            if isinstance(result, Exception):
                self._failed(op, result, told.append)
                continue
            run.last_seq = op.seq
            self._answer(op, told.append, result, {"version": run.step}, None)
        if told:
            send(*told)
        for op, run, _ in due:
            if op.run_id not in self._aside and self.held.is_due(run, op.replay or op.again):
                self.held.snapshot(run, send)

    def _answer(self, op: TrainOp, send: Tell, payload: bytes, facts: dict[str, int], failure: Failure | None) -> None:
        if op.replay:
            return
        if failure is not None and op.kind in STEPS_COUNT_ON and op.run_id in self.held.runs:
            self.held.runs[op.run_id].lacks = op.seq, step_not_taken(op.kind, failure.message)
        billed = failure is None or failure.ran
        send(Done(op.op_id, b"" if failure else payload, facts if billed else {}, failure))
        with logs.on(**facts_of(op)):
            log.debug("%s: %s", op.kind, "failed" if failure else "computed")
        ids: dict[str, tracing.Value | None] = {"run": op.run_id, "operation": op.op_id, "tokens": facts.get("tokens")}
        tracing.span(f"train {op.kind}", op.origin, self._pass_began, datetime.now(UTC), ids, failed=bool(failure))

    def _run(self, op: TrainOp) -> RunState:
        run = self.held.runs.get(op.run_id)
        if run is None:
            raise NotResident(f"run {op.run_id} is not on this trainer")
        return run

    def _decoder(self, spec: RunSpec) -> Decoder:
        decoder = self.models.get(spec.base_model)
        if decoder is None:
            raise NotResident(f"this trainer has no base model {spec.base_model!r}; it has {sorted(self.models)}")
        return decoder


def _lacks(op: TrainOp, run: RunState) -> str:
    """The message, told once, if the step `op` depends on a failed operation; "" if its client knows of that."""
    (number, why), run.lacks = max(op.lacks, run.lacks), (0, "")
    return why if number > op.knows and not op.replay else ""
