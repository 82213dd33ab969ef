"""The state of one run: adapter, optimizer moments and accumulated gradient in one flat float32 arena.

A checkpoint holds the adapter and, unless it is for sampling, the optimizer: loading it and going on is bitwise the
same as never having stopped. A gradient accumulated since the last optimizer step is not part of it (as in Tinker):
save after `optim_step`, or repeat the `forward_backward`s after loading. A snapshot, from which the service rebuilds a
run, holds that gradient too, and the finished part of an operation that is not complete. An export is the adapter in a
form that other tools read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import Tensor
from weft.wire import SaveWeightsExternalRequest
from weft.wire.binary.train_codec import decode_train_output, encode_train_output

from scheduler.links.messages import RunSpec
from store.blobs.contract import Blobs, Damaged, is_lasting
from workers.model.adapters.adapter import Adapter, AdapterFileError, LoadedAdapter, load_adapter, save_adapter
from workers.model.adapters.encryption import encrypt_folder, parse_recipients
from workers.model.adapters.peft_format import write_export
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig
from workers.trainer.runs.arena import Arena, ArenaKind, TakeArena


class StateError(ValueError):
    """A checkpoint that cannot become this run's state; the message says what does not agree."""


class DamagedState(StateError):
    """A checkpoint is not what was written: a fault of the disk, not of the user."""


#: The tensors of a snapshot beyond those of a checkpoint: the gradient since the last step; and gradient, tokens per
#: expert, outputs and other fields of an unfinished operation.
GRADIENT, PART_GRADIENT, PART_EXPERTS = "gradient", "part_gradient", "part_experts"
OUTPUTS_FILE, PART_FILE = "part_outputs.pb", "part.json"

#: Names of each optimizer's moments in a checkpoint, in the order m, v.
MOMENTS = {"adamw": ("adam_m", "adam_v"), "dimuon": ("dimuon_m",)}


@dataclass(frozen=True)
class PartDone:
    """The finished part of an operation that is not complete, without its gradient: the data up to `stop`, in `parts`
    (start, stop, tokens) as they were computed; an output per datum; `measures` as (total, weight)."""

    op_id: str
    stop: int
    parts: list[tuple[int, int, int]]
    outputs: list[dict[str, np.ndarray[Any, Any]]]
    measures: dict[str, tuple[float, float]]
    experts_LE: Tensor | None


@dataclass(eq=False)
class RunState:
    """`step` counts optimizer steps made. `last_seq` is the last operation that changed the run, `saved_seq`
    the last whose change needs no replay, and `unsaved_tokens` counts the tokens trained since the last snapshot.

    `arena` is None while the run is paged out (residency.py). Its gradient section holds the accumulated gradient, if
    `has_grad`, or accumulates that of the operation with id `gathering`. `apart` has the gradients of operations that
    began while the section was in use, by operation id. `dirty`: something has changed since the run's page was
    written; `paged_gradient` and `paged_apart` say what the page holds besides weights and moments. `part` came with a
    snapshot and waits for the rest of its operation. `saved_at`: when the run was last equal to a snapshot, in seconds
    of time.monotonic. A `guest` is at home on another rank: weights and gradient for a part of one operation. `lacks`:
    the number of the latest operation that failed and on which the next step counts, and what to tell it."""

    spec: RunSpec
    kind: ArenaKind
    arena: Arena | None
    step: int = 0
    has_grad: bool = False
    gathering: str = ""
    apart: dict[str, Adapter] = field(default_factory=dict)
    last_seq: int = 0
    saved_seq: int = -1
    unsaved_tokens: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    dirty: bool = True
    paged_gradient: bool = False
    paged_apart: tuple[str, ...] = ()
    part: PartDone | None = None
    guest: bool = False
    lacks: tuple[int, str] = (0, "")

    @property
    def unsaved(self) -> bool:
        return self.last_seq != self.saved_seq

    @property
    def adapter(self) -> Adapter:
        return self._here.weights

    @property
    def m(self) -> Tensor:
        return self._here.m

    @property
    def v(self) -> Tensor:
        """Empty where the optimizer keeps a single moment (dimuon)."""
        return self._here.v

    @property
    def grad(self) -> Adapter | None:
        """The accumulated gradient; None stands for zero."""
        return self._here.gradient if self.has_grad else None

    @property
    def gradient_in_use(self) -> bool:
        return self.has_grad or bool(self.gathering)

    @property
    def own_grad(self) -> Adapter:
        """The gradient section of the arena, whatever it holds."""
        return self._here.gradient

    def gathers(self, op_id: str) -> bool:
        """True if this run holds a gradient of the operation."""
        return op_id == self.gathering or op_id in self.apart

    def gradient_of(self, op_id: str) -> Adapter:
        """The arena that accumulates the gradient of one operation, across its passes; zeros at the first call.
        `accumulate` or `give_up` ends it."""
        arena = self._here
        self.dirty = True
        if op_id == self.gathering:
            return arena.gradient
        if op_id not in self.apart and not self.gradient_in_use:
            self.gathering = op_id
            arena.gradient.flat.zero_()
            return arena.gradient
        if op_id not in self.apart:
            self.apart[op_id] = Adapter.zeros(self.kind.shape, self.kind.scale, arena.flat.device)
        return self.apart[op_id]

    def accumulate(self, op_id: str) -> None:
        """Add the gradient of a complete operation to the run's."""
        mine, grad = self._here.gradient, self.gradient_of(op_id)
        if grad is mine:
            self.gathering = ""
        else:
            if self.gathering:  # used by an unfinished operation that began before this one
                self.apart[self.gathering] = Adapter(self.kind.shape, mine.flat.clone(), self.kind.scale)
                self.gathering = ""
            del self.apart[op_id]
            if self.has_grad:
                mine.flat.add_(grad.flat)
            else:
                mine.flat.copy_(grad.flat)
        self.has_grad = True

    def give_up(self, op_id: str) -> None:
        """Drop the gradient of an operation that has failed or will never be complete. The page of a run that is paged
        out keeps what it has of it, without a name."""
        if self.gathers(op_id):
            self.dirty = True
            self.apart.pop(op_id, None)
            self.gathering = "" if op_id == self.gathering else self.gathering
        self.paged_apart = tuple("" if kept == op_id else kept for kept in self.paged_apart)

    def due_grad(self, zeros: Tensor) -> Tensor:
        """The gradient for an optimizer step, of `zeros` if nothing is accumulated. Call `stepped` afterwards."""
        self.dirty = True
        gradient = self._here.gradient.flat
        return gradient if self.has_grad else zeros[: gradient.numel()]

    def stepped(self) -> None:
        self.step += 1
        self.has_grad = False

    @property
    def _here(self) -> Arena:
        if self.arena is None:
            raise RuntimeError(f"run {self.spec.run_id} is paged out")
        return self.arena


def kind_of(spec: RunSpec, config: DecoderConfig) -> ArenaKind:
    """The memory that a run needs. StateError when its specification cannot be met."""
    if spec.rank < 1:
        raise StateError(f"LoRA rank must be at least 1, got {spec.rank}")
    if spec.optimizer not in MOMENTS:
        raise StateError(f"unknown optimizer {spec.optimizer!r}; this trainer has {', '.join(MOMENTS)}")
    shape = AdapterShape(config, spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed)
    return ArenaKind(shape, spec.alpha / spec.rank, len(MOMENTS[spec.optimizer]))


def create_run(spec: RunSpec, config: DecoderConfig, take: TakeArena) -> RunState:
    """A fresh run: the same seed gives the same adapter on every device."""
    kind = kind_of(spec, config)
    return _fresh(spec, kind, Adapter.init(kind.shape, spec.seed, scale=kind.scale), take)


def _fresh(spec: RunSpec, kind: ArenaKind, adapter: Adapter, take: TakeArena) -> RunState:
    """A run with these weights and zero moments: every section that it reads is written here."""
    arena = take(kind)
    arena.weights.flat.copy_(adapter.flat)
    arena.m.zero_()
    arena.v.zero_()
    return RunState(spec, kind, arena)


def save_run(run: RunState, blobs: Blobs, ref: str, *, with_optimizer: bool) -> int:
    """Write a checkpoint folder at `ref`, whole or not at all. Returns its size in bytes."""
    details = {"optimizer": run.spec.optimizer, "step": run.step} if with_optimizer else {"step": run.step}
    with blobs.new_folder(ref) as folder:
        extra = _moments_of(run) if with_optimizer else {}
        save_adapter(run.adapter, folder, base_model=run.spec.base_model, extra=extra, details=details)
    return blobs.size_bytes(ref)


def save_snapshot(run: RunState, part: PartDone | None, blobs: Blobs, ref: str) -> None:
    """Write the whole state of the run, with the finished part of an operation that is not complete."""
    extra, details = _moments_of(run), {"optimizer": run.spec.optimizer, "step": run.step}
    if run.grad is not None:
        extra[GRADIENT] = run.grad.flat
    with blobs.new_folder(ref) as folder:
        if part is not None:
            extra |= _save_part(run, part, folder)
        save_adapter(run.adapter, folder, base_model=run.spec.base_model, extra=extra, details=details)


def _moments_of(run: RunState) -> dict[str, Tensor]:
    return dict(zip(MOMENTS[run.spec.optimizer], (run.m, run.v), strict=False))


def _save_part(run: RunState, part: PartDone, folder: Path) -> dict[str, Tensor]:
    """Write the finished part without its tensors, which are returned."""
    fields = {"op_id": part.op_id, "stop": part.stop, "parts": part.parts, "measures": part.measures}
    (folder / PART_FILE).write_text(json.dumps(fields))
    (folder / OUTPUTS_FILE).write_bytes(encode_train_output(part.outputs, {}))
    extra = {PART_EXPERTS: part.experts_LE} if part.experts_LE is not None else {}
    return extra | ({PART_GRADIENT: run.gradient_of(part.op_id).flat} if run.gathers(part.op_id) else {})


def _load_part(run: RunState, folder: Path, extra: Mapping[str, Tensor]) -> None:
    fields = json.loads((folder / PART_FILE).read_text())
    outputs, _ = decode_train_output((folder / OUTPUTS_FILE).read_bytes())
    run.part = PartDone(
        op_id=fields["op_id"],
        stop=fields["stop"],
        parts=[(start, stop, tokens) for start, stop, tokens in fields["parts"]],
        outputs=outputs,
        measures={name: (total, weight) for name, (total, weight) in fields["measures"].items()},
        experts_LE=extra.get(PART_EXPERTS),
    )
    if PART_GRADIENT in extra:
        run.gradient_of(run.part.op_id).flat.copy_(extra[PART_GRADIENT])


def load_run(
    spec: RunSpec, config: DecoderConfig, take: TakeArena, blobs: Blobs, ref: str, *, with_optimizer: bool
) -> RunState:
    """The run as checkpoint or snapshot `ref` holds it; without the optimizer its moments and step count start at zero.

    Raises StateError if it is missing or of another base model, rank, alpha or targets; DamagedState if it is not
    what was written; OSError when it cannot be read for now.
    """
    kind = kind_of(spec, config)
    with _readable(blobs, ref) as folder:
        with _as_checkpoint(folder):
            loaded = load_adapter(folder, config)
        return _loaded(spec, kind, take, loaded, folder, with_optimizer=with_optimizer)


@contextmanager
def _readable(blobs: Blobs, ref: str) -> Iterator[Path]:
    with ExitStack() as stack:
        with _as_checkpoint(blobs.root):
            folder = stack.enter_context(blobs.reading(ref))
        yield folder


@contextmanager
def _as_checkpoint(folder: Path) -> Iterator[None]:
    """The fault of the files in `folder`, for the user: without their path on this machine."""
    try:
        yield
    except (AdapterFileError, OSError, ValueError, SafetensorError) as error:
        if isinstance(error, OSError) and not is_lasting(error):
            raise
        if isinstance(error, Damaged):
            raise DamagedState(f"the checkpoint is damaged on the server's disk: {error}") from error
        reason = str(error).replace(str(folder), "checkpoint")
        raise StateError(f"the checkpoint cannot be read: {reason}") from error


def _loaded(
    spec: RunSpec, kind: ArenaKind, take: TakeArena, loaded: LoadedAdapter, folder: Path, *, with_optimizer: bool
) -> RunState:
    if loaded.base_model != spec.base_model:
        raise StateError(f"the checkpoint is of base model {loaded.base_model!r}, the run of {spec.base_model!r}")
    _check_same(spec, loaded.adapter)
    kind = replace(kind, shape=loaded.adapter.shape)  # the loaded adapter may not share factors among experts
    moments = _moments(spec, kind, loaded) if with_optimizer else None
    run = _fresh(spec, kind, loaded.adapter, take)
    if moments is not None:
        run.step, (m, *v) = loaded.details["step"], moments
        run.m.copy_(m)
        if v:
            run.v.copy_(v[0])
    if GRADIENT in loaded.extra:
        run.own_grad.flat.copy_(loaded.extra[GRADIENT])
        run.has_grad = True
    if (folder / PART_FILE).is_file():
        _load_part(run, folder, loaded.extra)
    return run


def _moments(spec: RunSpec, kind: ArenaKind, loaded: LoadedAdapter) -> list[Tensor]:
    saved = loaded.details.get("optimizer")
    if saved is not None and saved != spec.optimizer:
        raise StateError(f"the checkpoint holds the state of the optimizer {saved}, the run uses {spec.optimizer}")
    found = [loaded.extra.get(name) for name in MOMENTS[spec.optimizer]]
    moments = [x for x in found if x is not None and x.shape == (kind.shape.numel,)]
    if not isinstance(loaded.details.get("step"), int) or len(moments) < len(found):
        raise StateError("the checkpoint holds no optimizer state (is it one for sampling?)")
    return moments


def _check_same(spec: RunSpec, adapter: Adapter) -> None:
    shape = adapter.shape
    found = (shape.rank, adapter.scale * shape.rank, shape.train_attn, shape.train_mlp, shape.train_unembed)
    wanted = (spec.rank, spec.alpha, spec.train_attn, spec.train_mlp, spec.train_unembed)
    for name, have, need in zip(
        ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"), found, wanted, strict=True
    ):
        if abs(have - need) > 1e-6 * abs(need):
            raise StateError(f"the checkpoint has LoRA {name} {have}, the run {need}")


def save_external(run: RunState, blobs: Blobs, ref: str, body: bytes) -> int:
    """Write the adapter as an export (`peft_format`) at `ref`, encrypted where `body` names recipients. Returns its
    size in bytes."""
    request = SaveWeightsExternalRequest.model_validate_json(body)
    recipients = parse_recipients(request.age_encryption_recipients or [])
    adapter, spec = run.adapter, run.spec
    arrays = {name: view.cpu().numpy() for name, view in adapter.views.items()}
    with blobs.new_folder(ref) as folder:
        write_export(
            folder,
            arrays,
            base_model=spec.base_model,
            rank=spec.rank,
            alpha=adapter.scale * adapter.rank,
            in_size=adapter.shape.in_size,
            mixtral=adapter.shape.mixtral,
        )
        if recipients:
            encrypt_folder(folder, recipients)
    return blobs.size_bytes(ref)
