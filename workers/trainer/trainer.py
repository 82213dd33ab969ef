"""The trainer: holds all runs, in memory or paged out, and executes passes.

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
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec
import torch
from weft.wire.checks.losses import CUSTOM, loss_id_of

from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import (
    Done,
    Failure,
    HandedOver,
    InLoss,
    OpKind,
    Pass,
    PassOver,
    RunSpec,
    SetAside,
    Snapshot,
    TrainOp,
    facts_of,
)
from store import logs, tracing
from store.blobs import Blobs, StoreAway, is_lasting
from workers.model.decoder import Decoder
from workers.trainer.computing import Computing, Others
from workers.trainer.custom_losses import CustomLosses, UploadedLoss, most_work_of
from workers.trainer.failures import NotResident, failure_of
from workers.trainer.pages import PageError
from workers.trainer.progress import Part, Progress, begin
from workers.trainer.residency import resident_within, waves
from workers.trainer.state import (
    RunState,
    StateError,
    create_run,
    kind_of,
    load_run,
    save_external,
    save_run,
    save_snapshot,
)
from workers.trainer.stepping import step_runs
from workers.trainer.watchdog import no_limit

log = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], None]
#: Bounds what is done within it to so many seconds.
Limit = Callable[[float], AbstractContextManager[None]]


COMPUTE = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)
#: While a run is rebuilt, and until the operations that were pending when its trainer was lost are done, its state is
#: saved this often, so that even trainers which die again soon make progress.
SAVE_AGAIN_S = 2.0
#: A replay has been computed before: only a machine that is slower than it was makes it long.
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
        self.runs: dict[str, RunState] = {}
        device = next((decoder.device for decoder in self.models.values()), torch.device("cpu"))
        self.residency = resident_within(self.bounds, pages_dir or blobs.root.with_name("pages"), device)
        self._open: dict[str, Progress] = {}  # operations with slices still to come, by their id
        self._aside: dict[str, SetAside] = {}  # runs that take no further part in this pass
        self._custom_losses = CustomLosses(blobs)
        self._limit, self._others = limit, others
        self._pass_began = datetime.now(UTC)

    @property
    def memory_bytes(self) -> int:
        return self.residency.budget_bytes

    def execute(self, pass_: Pass, send: Send) -> None:
        """Execute a pass; `send` gets a Done for each operation as soon as it is finished, Snapshots when due, and
        PassOver at the end. An error of `send` (the server is gone) ends the pass."""
        with self._limit(pass_.limit_s or math.inf):
            self._execute(pass_, send)
            if self._others is not None:
                self._others.attend(lambda: deque(self._computing().run(self._decoder_of), maxlen=0))

    def _execute(self, pass_: Pass, send: Send) -> None:
        began, tokens, self._pass_began = time.monotonic(), 0, datetime.now(UTC)
        for run_id in pass_.release:
            self._forget(run_id)
        for run_id in pass_.hand_over:
            self._hand_over(run_id, send)
        queues: dict[str, deque[TrainOp]] = {}
        for op in pass_.ops:
            queues.setdefault(op.run_id, deque()).append(op)
        again = {op.run_id for op in pass_.ops if op.replay or op.again}
        for wave in self._waves(queues, pass_.soon):
            tokens += self._stages({run_id: queues[run_id] for run_id in wave}, send)
            for run_id in wave:
                self._end_wave(run_id, run_id in again, send)
        send(PassOver(pass_.pass_id, tokens, len(queues), time.monotonic() - began))

    def _end_wave(self, run_id: str, again: bool, send: Send) -> None:
        aside, run = self._aside.pop(run_id, None), self.runs.get(run_id)
        if aside is not None:
            if not aside.kept:
                self._forget(run_id)
            send(aside)
        elif run is not None and self._is_due(run, again):
            self._bring(run)
            self._snapshot(run, send)

    def _waves(self, queues: dict[str, deque[TrainOp]], soon: list[str]) -> Iterator[list[str]]:
        """The runs of the pass in sets that fit in memory. Each set, and the next behind it, is being paged in when it
        is given out; behind the last come the runs of the next pass. Runs in memory go first: computing them hides the
        time that the others take to be paged in."""
        here_first = sorted(queues, key=lambda run_id: not self.residency.is_here(run_id))
        sizes = {run_id: self.size_of(queues[run_id][0]) for run_id in here_first}
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
        """As many of these runs as fit in memory beside `beside` bytes."""
        room = self.residency.budget_bytes - beside
        sizes = [self.runs[run_id].kind.size_bytes if run_id in self.runs else 0 for run_id in run_ids]
        return [run_id for run_id, total in zip(run_ids, accumulate(sizes), strict=True) if total <= room]

    def size_of(self, op: TrainOp) -> int:
        """Bytes of memory that the run of `op` takes, or will take once it is created."""
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
        """Snapshot every changed run."""
        for run in sorted(self.runs.values(), key=lambda run: not self.residency.is_here(run.spec.run_id)):
            if self._is_changed(run):
                self.residency.hold([run.spec.run_id])
                self.residency.need(run)
                self._snapshot(run, send)

    def _hand_over(self, run_id: str, send: Send) -> None:
        """Save a run and forget it; what cannot be saved stays."""
        run = self.runs.get(run_id)
        kept = False
        if run is not None and self._is_changed(run):
            self.residency.hold([run_id])
            self._bring(run)
            kept = not self._snapshot(run, send)
        if not kept:
            self._forget(run_id)
        send(HandedOver(run_id, kept))

    def _forget(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self._open = {op_id: progress for op_id, progress in self._open.items() if progress.op.run_id != run_id}
        self.residency.forget(run_id)

    def _begun(self, run_id: str) -> list[Progress]:
        """The operations of a run whose last slice has not come yet."""
        return [progress for progress in self._open.values() if progress.op.run_id == run_id and not progress.ended]

    def _abandon(self, op: TrainOp) -> None:
        """Give up the run's other open operations: since `op` has come instead, their remaining slices never will."""
        for progress in self._begun(op.run_id):
            self._bring(progress.run)
            progress.abandon()
            del self._open[progress.op.op_id]
        run = self.runs.get(op.run_id)
        if run is not None and run.part is not None and run.part.op_id != op.op_id:
            self._bring(run)
            run.give_up(run.part.op_id)
            run.part = None

    def _bring(self, run: RunState) -> None:
        """Return when the run is in memory."""
        if not run.guest:
            self.residency.need(run)

    def _failed(self, op: TrainOp, error: Exception, send: Send) -> None:
        """An operation cannot be executed. If the disk does not answer, the run is set aside and tried again; if a
        replay fails, it is set aside for good, since it would not be the run that was lost. Else the client is told."""
        if not is_lasting(error):
            what = error if isinstance(error, StoreAway) else os.strerror(getattr(error, "errno", None) or 5)
            reason = f"operation {op.seq}: {type(error).__name__}, {what}"
            self._aside[op.run_id] = SetAside(op.run_id, reason, kept=not op.replay)
            return
        with logs.on(**facts_of(op)):
            failure = failure_of(error)
        if op.replay:
            self._aside[op.run_id] = SetAside(op.run_id, _cannot_replay(op, failure), lasting=True)
        else:
            self._answer(op, send, b"", {}, failure)

    def _alone(self, op: TrainOp, send: Send) -> None:
        """Create, load or save."""
        if op.run_id in self._aside:
            return
        self._abandon(op)
        facts: dict[str, int] = {}
        if (there := self.runs.get(op.run_id)) is not None:
            self._bring(there)
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
            self._snapshot(run, send)

    def _body(self, op: TrainOp) -> bytes:
        return self.blobs.get(op.body_ref, op.body_sha256)

    def _create(self, op: TrainOp) -> None:
        spec = op.spec
        if spec is None:
            raise NotResident(f"create operation {op.op_id} carries no run specification")
        decoder = self._decoder(spec)
        fresh = not op.source_ref
        run = create_run(spec, decoder.config, self.residency.take) if fresh else self._load_run(spec, op)
        run.last_seq = op.seq
        run.saved_seq = op.seq if fresh or op.replay else -1
        self._add(run)

    def _load(self, op: TrainOp) -> None:
        run = self._load_run(self._run(op).spec, op)
        run.last_seq = op.seq
        self._add(run)

    def _add(self, run: RunState) -> None:
        self.residency.add(run)
        self.runs[run.spec.run_id] = run

    def _load_run(self, spec: RunSpec, op: TrainOp) -> RunState:
        config = self._decoder(spec).config
        return load_run(spec, config, self.residency.take, self.blobs, op.source_ref, with_optimizer=op.with_optimizer)

    def _compute(self, ops: list[TrainOp], send: Send) -> int:
        """The forwards and backwards of a stage, packed. Returns the tokens computed."""
        computing = self._computing()
        for op in ops:
            if op.run_id in self._aside:
                continue
            progress = self._open.get(op.op_id)
            if progress is None:
                self._abandon(op)
                try:
                    progress = self._begin(op)
                except PageError:
                    raise
                except Exception as error:
                    if op.final or not is_lasting(error):
                        self._failed(op, error, send)
                    continue
                self._open[op.op_id] = progress
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

    def _computing(self) -> Computing:
        return Computing(self.bounds.microbatch_tokens, self._bring, self.residency.squeeze, self._others)

    def _decoder_of(self, run: RunState) -> Decoder:
        return self._decoder(run.spec)

    @contextmanager
    def _in_loss(self, custom: UploadedLoss, send: Send, part: Part) -> Iterator[None]:
        """Within it the uploaded loss of a part is computed. The server is told whose, for this process may be ended
        over it."""
        op = part.progress.op
        limit_s = self.bounds.loss_limit_s * (1 + most_work_of(custom, part.data) / 1024)
        if op.replay:
            with self._limit(REPLAY_LIMIT * limit_s):
                yield
            return
        send(InLoss(op.op_id, part.progress.tokens + part.tokens, limit_s))
        try:
            with self._limit(limit_s):
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
        self._bring(run)
        del self._open[op.op_id]
        payload, failure = progress.finish()
        if failure is not None and op.replay:
            self._aside.setdefault(op.run_id, SetAside(op.run_id, _cannot_replay(op, failure), lasting=True))
        if failure is None and op.kind is OpKind.FORWARD_BACKWARD:
            run.last_seq = op.seq
        if op.run_id not in self._aside or self._aside[op.run_id].kept:
            self._answer(op, send, payload, {"tokens": progress.tokens}, failure)

    def _step(self, ops: list[TrainOp], send: Send) -> None:
        """All optimizer steps of a stage, in one fused update."""
        due = []
        for op in ops:
            if op.run_id in self._aside:
                continue
            self._abandon(op)
            try:
                run = self._run(op)
                self._bring(run)
                due.append((op, run, self._body(op)))
            except PageError:
                raise
            except Exception as error:
                self._failed(op, error, send)
        results = step_runs([(run, body) for _, run, body in due])
        for (op, run, _), result in zip(due, results, strict=True):
            if isinstance(result, Exception):
                self._failed(op, result, send)
                continue
            run.last_seq = op.seq
            self._answer(op, send, result, {"version": run.step}, None)
            if self._is_due(run, op.replay or op.again):
                self._snapshot(run, send)

    def _is_due(self, run: RunState, again: bool) -> bool:
        """Whether the run's state is to be saved; `again`: it is being rebuilt after a trainer was lost."""
        if any(progress.failure is not None for progress in self._begun(run.spec.run_id)):
            return False  # the failed operation is about to end and leaves nothing to save
        often = again and time.monotonic() - run.saved_at >= SAVE_AGAIN_S
        return self._is_changed(run) and (often or run.unsaved_tokens >= self.bounds.snapshot_every_tokens)

    def _is_changed(self, run: RunState) -> bool:
        return run.unsaved or any(progress.parts for progress in self._begun(run.spec.run_id))

    def _snapshot(self, run: RunState, send: Send) -> bool:
        """False when it could not be written: the older one still holds."""
        run_id = run.spec.run_id
        part = next((progress.part_done() for progress in self._begun(run_id) if progress.parts), run.part)
        name = f"runs/{run_id}/state-{run.last_seq}" + (f".{part.stop}" if part is not None else "")
        try:
            # A snapshot of that name may be the journal's current one: it stays until the journal knows the new one.
            ref = f"{name}-{secrets.token_hex(4)}" if self.blobs.exists(name) else name
            save_snapshot(run, part, self.blobs, ref)
        except Exception:
            log.exception("run %s could not be saved; the next step tries again", run_id)
            return False
        run.saved_seq, run.unsaved_tokens, run.saved_at = run.last_seq, 0, time.monotonic()
        part_op, part_stop = (part.op_id, part.stop) if part is not None else ("", 0)
        send(Snapshot(run_id, run.last_seq, ref, part_op, part_stop))
        return True

    def _answer(self, op: TrainOp, send: Send, payload: bytes, facts: dict[str, int], failure: Failure | None) -> None:
        if op.replay:
            return
        billed = failure is None or failure.ran
        send(Done(op.op_id, b"" if failure else payload, facts if billed else {}, failure))
        with logs.on(**facts_of(op)):
            log.debug("%s: %s", op.kind, "failed" if failure else "computed")
        ids: dict[str, tracing.Value | None] = {"run": op.run_id, "operation": op.op_id, "tokens": facts.get("tokens")}
        tracing.span(f"train {op.kind}", op.origin, self._pass_began, datetime.now(UTC), ids, failed=bool(failure))

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
    """Take from the head of every run's queue the operations of these kinds."""
    taken: list[TrainOp] = []
    for queue in queues.values():
        count = 0
        while queue and queue[0].kind in kinds and count < at_most:
            taken.append(queue.popleft())
            count += 1
    return taken


def _cannot_replay(op: TrainOp, failure: Failure) -> str:
    what = "its snapshot" if op.kind is OpKind.CREATE and op.source_ref else f"operation {op.seq} ({op.kind})"
    return f"{what} cannot be repeated: {failure.message}"
