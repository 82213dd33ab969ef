"""Programs over the service, as plain data: what several clients of two organisations ask for, in one order.

A program is a tuple of operations. Each names its run by a small number of its own and its data by lengths and a seed,
so that a program can be printed, pasted into a test and made smaller one piece at a time. `steps_of` gives every
operation the sequence numbers that a client would, leaves out what makes no sense (a run that was never created, a
session that has ended) and says what each step must wait for, so that a program has one meaning in whatever order and
however often its requests arrive.

Imports nothing of the server: whoever plays a program, in the service or in plain torch, reads it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

#: The vocabulary of the base model that programs are played on.
VOCAB = 96
CONTEXT = 128
#: `alpha / rank` scales what an adapter adds; the service chooses it.
ALPHA = 32.0
#: Sessions belong to these in turn.
ORGANISATIONS = ("acme", "rival")
#: Names of checkpoints that `steps_of` adds at the end: each run's state, and its state after one more step, whose
#: first moment shows the gradient that was left in the run.
LAST, BEYOND = 90, 91

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Batch:
    """Data of these lengths, drawn from `seed`, and the loss over them."""

    lengths: tuple[int, ...]
    seed: int = 0
    loss: str = "cross_entropy"
    config: tuple[tuple[str, float], ...] = ()
    targets: int = 1  # per position; several only for cross_entropy


@dataclass(frozen=True)
class Datum:
    """`tokens` [T]; `inputs` are the loss's, each [T], or [T, targets]."""

    tokens: Array
    inputs: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Create:
    """A new run. Its adapter's first weights follow from rank and seed."""

    run: int
    session: int = 0
    rank: int = 4
    seed: int = 0
    attn: bool = True
    mlp: bool = True
    unembed: bool = True
    optimizer: Literal["adamw", "dimuon"] = "adamw"


@dataclass(frozen=True)
class Resume:
    """A new run that goes on from the state that run `source[0]` saved under the name `source[1]`."""

    run: int
    session: int
    source: tuple[int, int]
    optimizer: bool = True


@dataclass(frozen=True)
class Forward:
    """Compute losses and logprobs, and train nothing. Sent in `chunks` operations, as clients split large batches."""

    run: int
    batch: Batch
    chunks: int = 1


@dataclass(frozen=True)
class ForwardBackward:
    """Add the gradient of the batch to the run's."""

    run: int
    batch: Batch
    chunks: int = 1


@dataclass(frozen=True)
class TwoPass:
    """A loss of the client's own: a forward, then a cross_entropy with the weights of `two_pass_weights`."""

    run: int
    batch: Batch


@dataclass(frozen=True)
class Step:
    """One optimizer step with the parameters of the run's optimizer: dimuon takes the learning rate, beta1 and the
    clipping alone."""

    run: int
    learning_rate: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SaveState:
    """Save weights and optimizer as the checkpoint `name`. A name that is taken is refused, unless `overwrite`."""

    run: int
    name: int
    overwrite: bool = False


@dataclass(frozen=True)
class SaveSampler:
    """Save the weights to sample from as sampler `sampler`: under a name with a sampler of that (`named`), unnamed and
    at once, or (`inflight`) as the sampler that follows the run."""

    run: int
    sampler: int
    kind: Literal["named", "snapshot", "inflight"] = "snapshot"


@dataclass(frozen=True)
class Load:
    """Load a saved state into the run. A gradient that was accumulated is lost with the weights it belonged to."""

    run: int
    source: tuple[int, int]
    optimizer: bool = True


@dataclass(frozen=True)
class Sample:
    """Tokens from sampler `sampler`, or, where that is None, from the base model in session `session`."""

    sampler: int | None
    session: int = 0
    seed: int = 0
    temperature: float = 1.0
    prompt: int = 4  # tokens, drawn from the seed
    max_tokens: int = 4
    num_samples: int = 1


@dataclass(frozen=True)
class EndSession:
    """End a session. What is queued still runs, but no more is accepted."""

    session: int


#: What is wrong in a Bad operation: a token id that the model lacks; targets shorter than the input; an unknown loss; a
#: NaN weight; a weight so large that the gradient is not finite; parameters of the other optimizer; a checkpoint that
#: does not exist.
Fault = Literal["token", "lengths", "loss", "nan", "overflow", "optimizer", "path"]
FAULTS: tuple[Fault, ...] = ("token", "lengths", "loss", "nan", "overflow", "optimizer", "path")


@dataclass(frozen=True)
class Bad:
    """An operation that must fail, use up its number, and leave nothing behind."""

    run: int
    fault: Fault
    batch: Batch = Batch((5, 3))


Operation = (
    Create
    | Resume
    | Forward
    | ForwardBackward
    | TwoPass
    | Step
    | SaveState
    | SaveSampler
    | Load
    | Sample
    | EndSession
    | Bad
)
Program = tuple[Operation, ...]


# ---- data

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
#: The loss that programs upload as a graph (`custom_loss`).
CUSTOM = "custom"
LOSSES = ("cross_entropy", *RL_LOSSES, CUSTOM)


def data_of(batch: Batch) -> list[Datum]:
    """The data of a batch; equal batches have equal data. In RL data some positions have advantage 0, with a recorded
    logprob of 0 as on prompts, or with another."""
    rng = np.random.default_rng(batch.seed)
    return [_datum(batch, length, rng) for length in batch.lengths]


def _datum(batch: Batch, length: int, rng: np.random.Generator) -> Datum:
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    if batch.loss == "cross_entropy":
        shape = (length,) if batch.targets == 1 else (length, batch.targets)
        weights = rng.normal(size=shape).astype(np.float32)
        return Datum(tokens, {"target_tokens": rng.integers(0, VOCAB, shape), "weights": weights})
    advantages = rng.normal(size=length).astype(np.float32)
    logprobs = rng.uniform(-7, -3, length).astype(np.float32)
    kind = rng.integers(0, 4, length)
    advantages[kind < 2] = 0.0
    logprobs[kind < 1] = 0.0
    inputs = {"target_tokens": rng.integers(0, VOCAB, length), "logprobs": logprobs, "advantages": advantages}
    if batch.loss == "gspo":
        inputs["sequence_ratio_mask"] = (kind > 0).astype(np.float32)
        inputs["sequence_ratio_mask"][-1] = 1.0  # type: ignore[index]
    return Datum(tokens, inputs)


def custom_loss(logprobs: Any, advantages: Any, q: Any) -> Any:
    """The loss of one datum in a batch of CUSTOM: torch tensors [T]; `q` is the input `logprobs`. It is traced, so it
    is plain arithmetic."""
    ratio = (logprobs - q).clamp(-5.0, 5.0).exp()
    loss = (0.05 * (logprobs - q) * (logprobs - q) - ratio * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/loss:sum": loss}


def custom_inputs(datum: Datum) -> dict[str, Array]:
    """A datum of CUSTOM as it is sent: `q` beside the advantages. The loss is a function of `logprobs`."""
    inputs = dict(datum.inputs)
    inputs["q"] = inputs.pop("logprobs")
    return inputs


def two_pass_weights(datum: Datum, logprobs: Array) -> Array:
    """-dC/dlp of the client's loss C = sum w (lp + 4)^2 / 2, with the datum's weights w: what a TwoPass sends as
    weights of cross_entropy after its forward."""
    weights: Array = -(datum.inputs["weights"] * (logprobs.astype(np.float32) + np.float32(4.0))).astype(np.float32)
    return weights


def prompt_of(sample: Sample) -> list[int]:
    rng = np.random.default_rng(sample.seed + 1000)
    return [int(token) for token in rng.integers(0, VOCAB, sample.prompt)]


def chunks_of(lengths: Sequence[int], chunks: int) -> list[tuple[int, int]]:
    """Where a batch is cut into operations: (start, stop) of its data, as even as can be, none empty."""
    count = max(1, min(chunks, len(lengths)))
    bounds = [round(index * len(lengths) / count) for index in range(count + 1)]
    return list(pairwise(bounds))


# ---- what a program means


@dataclass(frozen=True)
class Planned:
    """An operation of a program with its place.

    `seqs`: its sequence numbers in its run (one for each chunk; two of a TwoPass); `model_seq`: the number of a new run
    in its session; `sampler_seq`: that of a new sampler in its session, or of a sample in its sampler. Before it is
    sent, operations at the places `answered` must have their results, and those at `accepted` must have been
    accepted."""

    place: int
    op: Operation
    session: int
    seqs: tuple[int, ...] = ()
    model_seq: int = 0
    sampler_seq: int = 0
    answered: frozenset[int] = frozenset()
    accepted: frozenset[int] = frozenset()


@dataclass
class _Planner:
    """What is known while a program is read from front to back."""

    planned: list[Planned] = field(default_factory=list)
    runs: dict[int, int] = field(default_factory=dict)  # session of a run
    kinds: dict[int, Create] = field(default_factory=dict)  # rank, parts and optimizer of a run
    seqs: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    models: dict[int, int] = field(default_factory=dict)  # number of runs in a session so far
    samplers: dict[int, tuple[SaveSampler, int, int]] = field(default_factory=dict)  # (save, its place, session)
    numbers: dict[int, int] = field(default_factory=dict)  # number of samplers in a session so far
    samples: dict[int | tuple[str, int], int] = field(default_factory=dict)  # number of samples of a sampler so far
    saves: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # places of saves by run and name
    reads: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # places of loads by source
    optimizers: dict[int, str] = field(default_factory=dict)

    def add(self, op: Operation, session: int, **facts: Any) -> None:
        """Plan an operation. A client uses a run once it knows that it was created."""
        made = [
            e.place for e in self.planned if isinstance(e.op, Create | Resume) and e.op.run == getattr(op, "run", -1)
        ]
        facts["accepted"] = facts.get("accepted", frozenset()) | frozenset(made)
        self.planned.append(Planned(len(self.planned), op, session, **facts))

    def places(self, session: int) -> frozenset[int]:
        return frozenset(each.place for each in self.planned if each.session == session)

    def next_seqs(self, run: int, count: int) -> tuple[int, ...]:
        first = self.seqs[run]
        self.seqs[run] = first + count
        return tuple(range(first, first + count))

    def take(self, op: Operation) -> None:
        """Plan `op`, or leave it out if it makes no sense."""
        match op:
            case Create():
                self._create(op)
            case Resume():
                self._resume(op)
            case Sample():
                self._sample(op)
            case EndSession():
                self._end(op)
            case _ if op.run in self.runs and self.runs[op.run] not in self.ended:
                self._operate(op, self.runs[op.run])

    def _create(self, op: Create) -> None:
        if op.run not in self.runs and op.session not in self.ended and (op.attn or op.mlp or op.unembed):
            self._new_run(op.run, op.session, op)
            self.add(op, op.session, model_seq=self.models[op.session] - 1)

    def _new_run(self, run: int, session: int, kind: Create) -> None:
        self.runs[run], self.kinds[run], self.seqs[run] = session, kind, 1
        self.models[session] = self.models.get(session, 0) + 1

    def _resume(self, op: Resume) -> None:
        source = self.kinds.get(op.source[0])
        if (
            op.run in self.runs
            or op.session in self.ended
            or source is None
            or not self._visible(op.source, op.session)
        ):
            return
        self._new_run(op.run, op.session, source)
        place = len(self.planned)
        self.add(op, op.session, model_seq=self.models[op.session] - 1, answered=frozenset(self.saves[op.source]))
        self.reads.setdefault(op.source, []).append(place)

    def _visible(self, source: tuple[int, int], session: int) -> bool:
        """Whether a run of the same organisation has saved that name."""
        return source in self.saves and organisation(self.runs[source[0]]) == organisation(session)

    def _sample(self, op: Sample) -> None:
        if op.sampler is None:
            if op.session not in self.ended:
                self._add_sample(op, op.session, ("base", op.session), frozenset())
            return
        found = self.samplers.get(op.sampler)
        if found is not None and found[2] not in self.ended:
            self._add_sample(op, found[2], op.sampler, frozenset((found[1], *self._moves(found[0].run))))

    def _moves(self, run: int) -> list[int]:
        """Saves that have moved the inflight samplers of a run."""
        return [e.place for e in self.planned if isinstance(e.op, SaveSampler) and e.op.run == run]

    def _add_sample(self, op: Sample, session: int, key: int | tuple[str, int], answered: frozenset[int]) -> None:
        number = self.samples.get(key, 0)
        self.samples[key] = number + 1
        self.add(op, session, sampler_seq=number, answered=answered)

    def _end(self, op: EndSession) -> None:
        if op.session in self.ended or op.session not in self.models:
            return
        self.ended.add(op.session)
        here = self.places(op.session)
        several = Sample | TwoPass | SaveSampler  # a second request of the operation needs the session
        samples = frozenset(e.place for e in self.planned if e.place in here and isinstance(e.op, several))
        self.add(op, op.session, answered=samples, accepted=here)

    def _operate(self, op: Any, session: int) -> None:
        run: int = op.run
        match op:
            case Forward() | ForwardBackward():
                count = len(chunks_of(op.batch.lengths, op.chunks))
                self.add(op, session, seqs=self.next_seqs(run, count))
            case TwoPass():
                self.add(op, session, seqs=self.next_seqs(run, 2))
            case SaveState():
                source = (run, op.name)
                reads = frozenset(self.reads.get(source, ()))
                self.saves.setdefault(source, []).append(len(self.planned))
                self.add(op, session, seqs=self.next_seqs(run, 1), accepted=reads)
            case SaveSampler():
                self._save_sampler(op, session)
            case Load() if self._visible(op.source, session):
                self.reads.setdefault(op.source, []).append(len(self.planned))
                self.add(op, session, seqs=self.next_seqs(run, 1), answered=frozenset(self.saves[op.source]))
            case Step() | Bad():
                self.add(op, session, seqs=self.next_seqs(run, 1))

    def _save_sampler(self, op: SaveSampler, session: int) -> None:
        if op.sampler in self.samplers:
            return
        self.samplers[op.sampler] = (op, len(self.planned), session)
        number = self.numbers.get(session, 0)
        self.numbers[session] = number + 1
        # An inflight save moves the samplers that samples of this run may be drawn from, so those samples end first.
        drawn = frozenset(
            e.place
            for e in self.planned
            if isinstance(e.op, Sample) and e.op.sampler is not None and self.samplers[e.op.sampler][0].run == op.run
        )
        self.add(op, session, seqs=self.next_seqs(op.run, 1), sampler_seq=number, answered=drawn)


def organisation(session: int) -> str:
    return ORGANISATIONS[session % len(ORGANISATIONS)]


def steps_of(program: Sequence[Operation]) -> list[Planned]:
    """Every operation of a program that makes sense, with its place and what it waits for. At the end come operations
    that show each existing run's weights, optimizer and remaining gradient."""
    planner = _Planner()
    for op in program:
        planner.take(op)
    for run in [run for run, session in planner.runs.items() if session not in planner.ended]:
        for op in (SaveState(run, LAST, True), Step(run, 1e-3), SaveState(run, BEYOND, True)):
            planner.take(op)
    return planner.planned


def kind_of_run(steps: Sequence[Planned], run: int) -> Create:
    """Rank, trained parts and optimizer of a run; a resumed run has them from its source."""
    for each in steps:
        if isinstance(each.op, Create) and each.op.run == run:
            return each.op
        if isinstance(each.op, Resume) and each.op.run == run:
            return kind_of_run(steps, each.op.source[0])
    raise KeyError(run)
