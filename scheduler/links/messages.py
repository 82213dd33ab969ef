"""What travels between the queue and the machines, and nothing else.

Workers pull. A trainer sends `PullPass` and gets one `Pass`; while it runs it sends one `Done` per finished
operation, and `InLoss` around what an uploaded loss could make long; the next `PullPass` says that the pass is over.
`HandedOver` answers for each run that a pass has it give up, and `Leaving` says that it takes no more passes. A
generator sends `PullSamples` with its free slots and gets `SampleWork` as soon as there is any; `Cancel` may come to it
at any time.

Bodies and weights travel by reference: a `ref` names a blob (`store.blobs`). Everything here is plain data encoded with
msgpack; the embedded link frames it on a socket pair, the production link carries the same bytes through Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

import msgspec


class OpKind(StrEnum):
    """Every operation that a trainer can execute for a run."""

    CREATE = "create"  # make the adapter, fresh from its seed or from `source_ref`
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_state"  # adapter + optimizer into `target_ref`
    SAVE_SAMPLER = "save_sampler"  # adapter only into `target_ref`
    SAVE_EXTERNAL = "save_external"  # adapter as files for other tools, encrypted if the body asks, into `target_ref`
    LOAD_STATE = "load_state"  # in place, from `source_ref`


#: Operations that change a run. They are replayed, in order, to rebuild a run on a fresh trainer.
MUTATING = frozenset({OpKind.CREATE, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.LOAD_STATE})

#: Operations whose bodies trainers read. All others are described by their plans; their bodies may hold keys.
READ = frozenset({OpKind.FORWARD_BACKWARD, OpKind.FORWARD, OpKind.OPTIM_STEP, OpKind.SAVE_EXTERNAL})

#: Operations that write something lasting of a run, under a name or for a sampler.
SAVES = frozenset({OpKind.SAVE_STATE, OpKind.SAVE_SAMPLER, OpKind.SAVE_EXTERNAL})


#: The kind of a number of a run under which nothing has come (`scheduler.journal.gaps`).
NEVER_CAME = "never_came"

#: Operations that an optimizer step depends on: after one of these has failed, the next step is not taken
#: (`scheduler.order.gradients`). A number under which nothing came may have been one of them.
STEPS_COUNT_ON = frozenset({OpKind.FORWARD_BACKWARD, OpKind.LOAD_STATE, NEVER_CAME})


class FailureTold(msgspec.Struct, frozen=True):
    """A client was told `at` that time that operation `seq` of a run has failed."""

    run_id: str
    seq: int
    at: datetime


class RunSpec(msgspec.Struct, frozen=True):
    """The facts that a trainer needs to hold a run. `alpha / rank` scales the adapter's output; `optimizer` is the
    family of all its steps, adamw or dimuon."""

    run_id: str
    base_model: str
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: str = "adamw"


class TrainOp(msgspec.Struct, frozen=True):
    """One operation, or one slice of a large forward / forward_backward.

    `start:stop` is the range of data in the body that this slice covers; split points depend on the operation's own
    data alone. The slice with `final` completes the operation: the worker then answers with one `Done`. With `replay`
    the operation was already answered: only its effect on the run is wanted, and no `Done`. `again` says that a trainer
    was lost since it was accepted: how far it gets is written down more often. The body is `body` if it is small, else
    the blob `body_ref`; `body_sha256` its digest as hex; `origin` the HTTP request that brought it
    (`store.tracing.origin_here`), for log and traces. A step that `lacks` an operation (its number, and the error text)
    is not taken. `knows`: its client knows of all failures up to that number.
    """

    op_id: str
    run_id: str
    seq: int
    kind: OpKind
    body_ref: str = ""
    start: int = 0
    stop: int = 0
    final: bool = True
    replay: bool = False
    again: bool = False
    body_sha256: str = ""
    origin: str = ""
    org_id: str = ""
    source_ref: str = ""
    target_ref: str = ""
    with_optimizer: bool = False
    spec: RunSpec | None = None  # with CREATE only
    body: bytes = b""
    lacks: tuple[int, str] = (0, "")
    knows: int = 0


def facts_of(op: TrainOp | SampleOp) -> dict[str, str]:
    """What log lines about an operation say (`store.logs`)."""
    return {"request": op.origin.partition(" ")[0], "org": op.org_id, "run": op.run_id, "operation": op.op_id}


class PullPass(msgspec.Struct, frozen=True, tag=True):
    """A trainer is free for a pass of any of these base models. Its runs may take `memory_bytes`, if it says so."""

    models: list[str]
    memory_bytes: int = 0


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Work for one pass, all of one base model. Operations of one run stand in the order they must be executed in;
    different runs are independent and should share compute. `release` names runs to forget first. `soon` are the runs
    next in the queue: a trainer that has paged them out may bring them in while it computes this pass. The runs to
    `hand_over` go on elsewhere: before all else they are saved and forgotten. A trainer that needs longer than
    `limit_s` ends itself."""

    pass_id: int
    base_model: str
    ops: list[TrainOp]
    release: list[str] = []
    soon: list[str] = []
    limit_s: float = 0.0  # 0: as long as it likes
    hand_over: list[str] = []


class InLoss(msgspec.Struct, frozen=True, tag=True):
    """A trainer computes the uploaded loss of operation `op_id`, and ends itself if that takes longer than `limit_s`.
    When this part is done, `tokens` tokens of the operation have been computed. An empty `op_id` says that the loss is
    done."""

    op_id: str = ""
    tokens: int = 0
    limit_s: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """Why an operation failed. `category` is "user" or "server", as in Tinker's RequestFailedResponse. `ran`: it was
    computed, and what its user has sent made it fail, so the tokens in its facts are billed."""

    message: str
    category: str = "server"
    ran: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """One operation is finished: `payload` is the encoded result (protobuf for forward, forward_backward and sample;
    JSON for optim_step; empty for create, save and load), `facts` are counts for metering and storage:
    `tokens` trained, `size_bytes` written, the policy `version` after an optim_step, or, of a sample, `prefill`,
    `cached_prefill` and `sample` tokens. `drawn` counts the tokens of each sequence of a sample by the version of its
    run's policy that they were drawn from. `recorded`: the logprobs of a sample's sequences are to be kept."""

    op_id: str
    payload: bytes = b""
    facts: dict[str, int] = {}
    failure: Failure | None = None
    drawn: tuple[dict[int, int], ...] = ()
    recorded: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """A trainer has written the whole state of a run, as it was right after operation `seq`, to `ref`: with the
    gradient gathered since the last step, and with what is computed of operation `part_op`, the next that has begun, of
    whose data `part_stop` are done."""

    run_id: str
    seq: int
    ref: str
    part_op: str = ""
    part_stop: int = 0


class SetAside(msgspec.Struct, frozen=True, tag=True):
    """A trainer has left out a run's operations, from one of them on, and does nothing more for the run until it is
    sent them again: the disk did not answer, or the run could not be rebuilt. With `kept` it still holds the run as it
    was before that operation; else it has forgotten it. With `lasting` trying again cannot help."""

    run_id: str
    reason: str
    kept: bool = False
    lasting: bool = False


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """A trainer has forgotten a run that it was to hand over; its unsaved state came in a `Snapshot` before. With
    `kept` the state could not be saved, and the trainer still holds the run."""

    run_id: str
    kept: bool = False


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """A trainer is about to end: it saves its runs, and ignores a pass that is on its way to it."""


class PassOver(msgspec.Struct, frozen=True, tag=True):
    """A trainer has finished pass `pass_id`: how it went, for the statistics."""

    pass_id: int
    tokens: int
    runs: int
    seconds: float


class PullSamples(msgspec.Struct, frozen=True, tag=True):
    """A generator has `free_slots` free. With none, it would set others aside for `yields` sequences
    (`FairQueue.lease`)."""

    models: list[str]
    free_slots: int
    yields: int = 0


class SampleOp(msgspec.Struct, frozen=True):
    """One sample request of `num_samples` sequences. The body is the JSON of `weft.wire` SampleRequest: `body` if it is
    small, else the blob `body_ref`.
    `adapter_ref` is a folder of sampler weights ("" samples the base model); equal refs are equal weights.
    Sequence i is known to clients of the session as `sequence_id(op_id, i)`.

    `run_id` is the run whose weights these are, "" for the base model's and for those of others. With `inflight` the
    sampler follows that run: newer weights of it apply to the request while it runs (`PolicyMoved`). `version` is how
    far the run is, as far as the server knows (optimizer steps). A higher `priority` goes first."""

    op_id: str
    base_model: str
    body_ref: str
    num_samples: int
    adapter_ref: str = ""
    session_id: str = ""
    org_id: str = ""
    run_id: str = ""
    inflight: bool = False
    version: int = 0
    priority: int = 0
    body_sha256: str = ""
    origin: str = ""
    body: bytes = b""


def sequence_id(op_id: str, sample: int) -> str:
    """The name of one sampled sequence, unique in its session; training data refer to it."""
    return f"{op_id}:{sample}"


def loss_ref(loss_id: str) -> str:
    """The blob of an uploaded loss."""
    return f"losses/{loss_id}"


def stability_ref(session_id: str, sequence: str) -> str:
    """The blob of the logprobs that `sequence` was sampled with, for stable_reinforce: float32, little-endian, one per
    token."""
    return f"stability/{session_id}/{sequence}"


class SampleWork(msgspec.Struct, frozen=True, tag=True):
    ops: list[SampleOp]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Tells a generator to finish a sample now, with the tokens drawn so far."""

    op_id: str


class PolicyMoved(msgspec.Struct, frozen=True, tag=True):
    """The policy of a run is at `version` (optimizer steps). With `adapter_ref` its inflight samplers are on the
    weights there from now on, also for samples that run. `seq` is of the run's operation that moved it."""

    run_id: str
    version: int
    adapter_ref: str = ""
    seq: int = 0


class DrawnTokens(msgspec.Struct, frozen=True):
    """Tokens of sequence `sample` of a request, from its token number `start` on: the logprob of each, the policy
    version that drew it, and the likeliest tokens beside it (ids and logprobs) where they are asked for."""

    sample: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    tops: list[tuple[list[int], list[float]]] = []


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """Tokens of a streamed sample since the last such message. All of them are also in its `Done`."""

    op_id: str
    parts: list[DrawnTokens]


class Declined(msgspec.Struct, frozen=True, tag=True):
    """A generator gives a sample back. Its engine cannot serve it and another kind might: it fails with `message` when
    no generator takes it; with `adapter`, the reason lies in the sampler's weights. Or, with `lost`, its engine died
    over it: then it counts as one that was in a generator's hands when that died."""

    op_id: str
    message: str
    adapter: bool = False
    lost: bool = False


class Occupancy(msgspec.Struct, frozen=True, tag=True):
    """A generator's decode steps since its last report: `busy / offered` is the share of slots that worked while
    at least one did. Of the tokens that were drafted (`[generator] lookup`) those accepted were drawn."""

    steps: int
    slots_busy: int
    slots_offered: int
    seconds: float
    drafted: int = 0
    accepted: int = 0


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what you have, snapshot, and exit."""


ToTrainer = Pass | Drain
FromTrainer = PullPass | InLoss | Done | Snapshot | SetAside | HandedOver | Leaving | PassOver
ToGenerator = SampleWork | Cancel | PolicyMoved | Drain
FromGenerator = PullSamples | Done | Drawn | Declined | Occupancy


def form_of(structs: Iterable[type[msgspec.Struct]], kinds: Iterable[str]) -> str:
    """A name for a message format: it changes as soon as a message, or a field of one, does."""
    fields = sorted((struct.__name__, tuple(struct.__annotations__.items())) for struct in structs)
    return hashlib.sha256(repr([fields, *kinds]).encode()).hexdigest()[:12]


#: The format of all messages above. A process of another version would drop fields that it does not know; over Redis,
#: where processes of several versions may meet, only those of one format find each other.
FORM = form_of(
    (each for each in list(globals().values()) if isinstance(each, type) and issubclass(each, msgspec.Struct)), OpKind
)
