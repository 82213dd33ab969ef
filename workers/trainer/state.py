"""The state of one run: adapter, optimizer moments and accumulated gradient on flat float32 arenas.

A checkpoint holds the adapter and, unless it is for sampling, the optimizer: loading it and going on is bitwise the
same as never having stopped. A gradient accumulated since the last optimizer step is not part of it (as in Tinker):
save after `optim_step`, or repeat the `forward_backward`s after loading.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scheduler.messages import RunSpec
from store.blobs import Blobs
from workers.model.adapter import Adapter, AdapterFileError, AdapterShape, load_adapter, save_adapter
from workers.model.config import DecoderConfig


class StateError(ValueError):
    """A checkpoint that cannot become this run's state; the message says what does not agree."""


#: What a checkpoint calls the moments of each optimizer, in the order m, v.
MOMENTS = {"adamw": ("adam_m", "adam_v"), "dimuon": ("dimuon_m",)}


@dataclass
class RunState:
    """`m` and `v` are the optimizer's moments; one that keeps a single moment (dimuon) leaves `v` empty. `grad` is
    None while nothing is accumulated: that is a gradient of zero. `step` counts optimizer steps made. `last_seq` is the
    last operation that changed the run; `unsaved` is set while no snapshot holds that change, and `unsaved_tokens`
    counts the tokens trained since the last snapshot."""

    spec: RunSpec
    adapter: Adapter
    m: Tensor
    v: Tensor
    step: int = 0
    grad: Adapter | None = None
    last_seq: int = 0
    unsaved: bool = False
    unsaved_tokens: int = 0

    def new_grad(self) -> Adapter:
        """A zero arena for gradients of this run's adapter."""
        return Adapter.zeros(self.adapter.shape, self.adapter.scale, self.adapter.flat.device)

    def accumulate(self, grad: Adapter) -> None:
        """Add the gradient of a whole operation. Takes `grad` over: the caller does not use it again."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad.flat.add_(grad.flat)


def create_run(spec: RunSpec, config: DecoderConfig, device: torch.device) -> RunState:
    """A fresh run: the same seed gives the same adapter on every device."""
    if spec.rank < 1:
        raise StateError(f"LoRA rank must be at least 1, got {spec.rank}")
    adapter = Adapter.init(_shape(spec, config), spec.seed, scale=spec.alpha / spec.rank, device=device)
    return _with_fresh_optimizer(spec, adapter)


def _with_fresh_optimizer(spec: RunSpec, adapter: Adapter) -> RunState:
    if spec.optimizer not in MOMENTS:
        raise StateError(f"unknown optimizer {spec.optimizer!r}; this trainer has {', '.join(MOMENTS)}")
    m = torch.zeros_like(adapter.flat)
    v = torch.zeros_like(adapter.flat) if len(MOMENTS[spec.optimizer]) == 2 else m.new_empty(0)
    return RunState(spec, adapter, m, v)


def save_run(run: RunState, blobs: Blobs, ref: str, *, with_optimizer: bool) -> int:
    """Write a checkpoint folder at `ref`, whole or not at all. Returns its size in bytes."""
    names = MOMENTS[run.spec.optimizer] if with_optimizer else ()
    extra = dict(zip(names, (run.m, run.v), strict=False))
    details = {"optimizer": run.spec.optimizer, "step": run.step} if with_optimizer else None
    with blobs.new_folder(ref) as folder:
        save_adapter(run.adapter, folder, base_model=run.spec.base_model, extra=extra, details=details)
    return blobs.size_bytes(ref)


def load_run(
    spec: RunSpec, config: DecoderConfig, device: torch.device, blobs: Blobs, ref: str, *, with_optimizer: bool
) -> RunState:
    """The run as checkpoint `ref` holds it; without the optimizer its moments and step count start at zero.

    Raises StateError when the checkpoint is missing, damaged, or of another base model, rank, alpha or targets.
    """
    try:
        loaded = load_adapter(blobs.path(ref), config, device=device)
    except (AdapterFileError, OSError, ValueError) as error:
        # The path on this machine is nobody's business.
        reason = str(error).replace(str(blobs.path(ref)), "checkpoint")
        raise StateError(f"the checkpoint cannot be read: {reason}") from error
    if loaded.base_model != spec.base_model:
        raise StateError(f"the checkpoint is of base model {loaded.base_model!r}, the run of {spec.base_model!r}")
    _check_same(spec, loaded.adapter)
    run = _with_fresh_optimizer(spec, loaded.adapter)
    if not with_optimizer:
        return run
    names, step = MOMENTS[spec.optimizer], loaded.details.get("step")
    saved = loaded.details.get("optimizer")
    if saved is not None and saved != spec.optimizer:
        raise StateError(f"the checkpoint holds the state of the optimizer {saved}, the run uses {spec.optimizer}")
    moments = [loaded.extra.get(name) for name in names]
    if not isinstance(step, int) or any(x is None or x.shape != run.m.shape for x in moments):
        raise StateError("the checkpoint holds no optimizer state (is it one for sampling?)")
    for mine, theirs in zip((run.m, run.v), moments, strict=False):
        if theirs is not None:
            mine.copy_(theirs)
    run.step = step
    return run


def _shape(spec: RunSpec, config: DecoderConfig) -> AdapterShape:
    return AdapterShape(config, spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed)


def _check_same(spec: RunSpec, adapter: Adapter) -> None:
    shape = adapter.shape
    found = (shape.rank, adapter.scale * shape.rank, shape.train_attn, shape.train_mlp, shape.train_unembed)
    wanted = (spec.rank, spec.alpha, spec.train_attn, spec.train_mlp, spec.train_unembed)
    for name, have, need in zip(
        ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"), found, wanted, strict=True
    ):
        if abs(have - need) > 1e-6 * abs(need):
            raise StateError(f"the checkpoint has LoRA {name} {have}, the run {need}")
