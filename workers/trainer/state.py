"""The state of one run: adapter, optimizer moments and accumulated gradient in one flat float32 arena.

A checkpoint holds the adapter and, unless it is for sampling, the optimizer: loading it and going on is bitwise the
same as never having stopped. A gradient accumulated since the last optimizer step is not part of it (as in Tinker):
save after `optim_step`, or repeat the `forward_backward`s after loading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from scheduler.messages import RunSpec
from store.blobs import Blobs
from workers.model.adapter import Adapter, AdapterFileError, AdapterShape, LoadedAdapter, load_adapter, save_adapter
from workers.model.config import DecoderConfig
from workers.trainer.arena import Arena, ArenaKind, TakeArena


class StateError(ValueError):
    """A checkpoint that cannot become this run's state; the message says what does not agree."""


#: What a checkpoint calls the moments of each optimizer, in the order m, v.
MOMENTS = {"adamw": ("adam_m", "adam_v"), "dimuon": ("dimuon_m",)}


@dataclass(eq=False)
class RunState:
    """`step` counts optimizer steps made. `last_seq` is the last operation that changed the run; `unsaved` is set while
    no snapshot holds that change, and `unsaved_tokens` counts the tokens trained since the last snapshot.

    `arena` is None while the run is paged out (residency.py); what needs it may be asked only when it is there. The
    gradient's section holds the accumulated gradient, with `has_grad`, or gathers that of an operation, while `lent`.
    `spare` is the gradient of an operation between two passes where the section is taken. `dirty` is set when
    something has changed since the run's page was written, and `paged_...` say what the page holds besides weights and
    moments."""

    spec: RunSpec
    kind: ArenaKind
    arena: Arena | None
    step: int = 0
    has_grad: bool = False
    lent: bool = False
    spare: Adapter | None = None
    last_seq: int = 0
    unsaved: bool = False
    unsaved_tokens: int = 0
    dirty: bool = True
    paged_gradient: bool = False
    paged_spare: bool = False

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
        """What is accumulated; None is a gradient of zero."""
        return self._here.gradient if self.has_grad else None

    @property
    def own_grad(self) -> Adapter:
        """The section for a gradient, whatever is in it."""
        return self._here.gradient

    @property
    def gradient_in_use(self) -> bool:
        return self.has_grad or self.lent

    def new_grad(self) -> Adapter:
        """Zeros in which to gather the gradient of one operation: hand it to `accumulate` or `give_up`."""
        self.dirty = True
        if self.gradient_in_use:
            return Adapter.zeros(self.kind.shape, self.kind.scale, self._here.flat.device)
        self.lent = True
        self._here.gradient.flat.zero_()
        return self._here.gradient

    def accumulate(self, grad: Adapter) -> None:
        """Add the gradient of a whole operation. The caller does not use `grad` again."""
        mine = self._here.gradient
        self.dirty = True
        if grad is mine:
            self.lent = False
        elif self.has_grad:
            mine.flat.add_(grad.flat)
        else:
            mine.flat.copy_(grad.flat)
        self.has_grad = True

    def give_up(self, grad: Adapter) -> None:
        """The operation has failed: nothing is left of its gradient."""
        if grad is self._here.gradient:
            self.lent = False

    def due_grad(self) -> Tensor:
        """What the optimizer steps by, zeros if nothing is accumulated. `stepped` follows."""
        self.dirty = True
        gradient = self._here.gradient.flat
        return gradient if self.has_grad else gradient.zero_()

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
    """A run with these weights and nothing behind it: all that it will read is written here."""
    arena = take(kind)
    arena.weights.flat.copy_(adapter.flat)
    arena.m.zero_()
    arena.v.zero_()
    return RunState(spec, kind, arena)


def save_run(run: RunState, blobs: Blobs, ref: str, *, with_optimizer: bool) -> int:
    """Write a checkpoint folder at `ref`, whole or not at all. Returns its size in bytes."""
    names = MOMENTS[run.spec.optimizer] if with_optimizer else ()
    extra = dict(zip(names, (run.m, run.v), strict=False))
    details = {"optimizer": run.spec.optimizer, "step": run.step} if with_optimizer else {"step": run.step}
    with blobs.new_folder(ref) as folder:
        save_adapter(run.adapter, folder, base_model=run.spec.base_model, extra=extra, details=details)
    return blobs.size_bytes(ref)


def load_run(
    spec: RunSpec, config: DecoderConfig, take: TakeArena, blobs: Blobs, ref: str, *, with_optimizer: bool
) -> RunState:
    """The run as checkpoint `ref` holds it; without the optimizer its moments and step count start at zero.

    Raises StateError when the checkpoint is missing, damaged, or of another base model, rank, alpha or targets.
    """
    kind = kind_of(spec, config)
    try:
        loaded = load_adapter(blobs.path(ref), config)
    except (AdapterFileError, OSError, ValueError) as error:
        # The path on this machine is nobody's business.
        reason = str(error).replace(str(blobs.path(ref)), "checkpoint")
        raise StateError(f"the checkpoint cannot be read: {reason}") from error
    if loaded.base_model != spec.base_model:
        raise StateError(f"the checkpoint is of base model {loaded.base_model!r}, the run of {spec.base_model!r}")
    _check_same(spec, loaded.adapter)
    kind = replace(kind, shape=loaded.adapter.shape)  # which may not share factors among experts
    moments = _moments(spec, kind, loaded) if with_optimizer else None
    run = _fresh(spec, kind, loaded.adapter, take)
    if moments is not None:
        run.step, (m, *v) = loaded.details["step"], moments
        run.m.copy_(m)
        if v:
            run.v.copy_(v[0])
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
