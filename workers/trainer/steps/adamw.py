"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on flat arenas: every run has its own hyperparameters and step count;
all due runs are updated together. stepping.py calls it.

Invariant (isolation): a run's result is bitwise the same whichever runs share the call. The fused kernel is
elementwise, one tensor after the other, and the only reduction, the gradient norm, stays inside one run's arena.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

#: How many squares of a gradient are added up in float32. A longer sum loses small numbers on a CPU: the norm of 1e8
#: numbers came out 1 % too small.
NORM_BLOCK = 1 << 16
#: The square of a larger number overflows float32: its second moment would stay infinite, and its weight never move.
MOST_NORM = 2.0**64


class OptimizerError(ValueError):
    """A step that is refused because of its request or its gradient; nothing has changed."""


class HalfDone(RuntimeError):
    """An update failed after it had begun to change its runs. Whatever the reason, it must not be tried again."""


@contextmanager
def changing() -> Iterator[None]:
    """In the block runs are changed in place, and no tensor may be made: an error becomes HalfDone."""
    try:
        yield
    except Exception as error:
        raise HalfDone(f"an optimizer step has failed half way: {type(error).__name__}") from error


@dataclass(frozen=True)
class Adam:
    """Hyperparameters of one step. `grad_clip_norm`: upper bound of the L2 norm of the whole gradient; 0 = no
    clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass
class Step:
    """One due update. Arenas are flat float32 of equal size and are changed in place, `grad` too (by clipping). `step`:
    the number of updates made before this one. `answered`: repeats a step that was answered already, so it is taken
    whatever the gradient's norm."""

    adam: Adam
    weights: Tensor
    m: Tensor
    v: Tensor
    grad: Tensor
    step: int
    answered: bool = False


def step_many(steps: Sequence[Step]) -> list[dict[str, float] | OptimizerError]:
    """Update every run. Returns for each its metrics, or the error that left it unchanged: its gradient is too large.
    Decoupled weight decay and bias correction as in torch.optim.AdamW. Out of memory is raised before anything has
    changed.

    Runs with equal hyperparameters share one call of torch's fused multi-tensor kernel, which takes one value of each
    hyperparameter; step counts and clipping may differ. Separate calls cost little: on a CPU the kernel goes through
    one arena after the other in any case, and 64 calls cost 0.5 ms more than one, beside the 10 ms that 64 runs of
    200,000 parameters take. Calls with a number per run (torch._foreach_mul_ and the like) would pass over memory ten
    times instead of once."""
    if not steps:
        return []
    norms = norms_of([step.grad for step in steps])
    results = [_result(step, norm) for step, norm in zip(steps, norms, strict=True)]
    counts = torch.tensor([float(s.step + 1) for s in steps], device=steps[0].weights.device).unbind()
    clipped: list[tuple[Tensor, float]] = []
    groups: dict[Adam, list[tuple[Step, Tensor]]] = defaultdict(list)
    for step, count, norm, result in zip(steps, counts, norms, results, strict=True):
        if not isinstance(result, OptimizerError):
            clipped.append((step.grad, clip_scale(norm, step.adam.grad_clip_norm)))
            adam = replace(step.adam, grad_clip_norm=0.0) if step.adam.grad_clip_norm else step.adam
            groups[adam].append((step, count))
    with changing():
        clip_gradients(clipped)
        for adam, group in groups.items():
            _fused(adam, group)
    return results


def _result(step: Step, norm: float) -> dict[str, float] | OptimizerError:
    """The metrics of a step, or the error with which the step is refused."""
    if step.answered or norm * clip_scale(norm, step.adam.grad_clip_norm) < MOST_NORM:
        return step_metrics(norm, step.adam.learning_rate, step.step)
    return OptimizerError(
        f"the norm of the accumulated gradient is {norm:.3g}; AdamW keeps its square, which is no float32 from "
        f"{MOST_NORM:.3g} on: repeat the step with adam_params.grad_clip_norm, or scale weights or advantages down"
    )


def clip_scale(norm: float, limit: float) -> float:
    """The factor that brings a gradient of this norm to at most `limit` (0 = none), as in
    torch.nn.utils.clip_grad_norm_."""
    return limit / (norm + 1e-6) if limit and limit < norm + 1e-6 else 1.0


def clip_gradients(clipped: Sequence[tuple[Tensor, float]]) -> None:
    """Multiply each gradient in place by its `clip_scale`."""
    over = [(grad, scale) for grad, scale in clipped if scale != 1]
    if over:
        torch._foreach_mul_([grad for grad, _ in over], [scale for _, scale in over])


def norms_of(grads: Sequence[Tensor]) -> list[float]:
    """The L2 norm of each gradient, from its own arena alone: float32 within blocks of NORM_BLOCK, float64 over blocks;
    float64 throughout if squares overflow float32."""
    blocks = [torch.split(grad, NORM_BLOCK) for grad in grads]
    of_blocks = torch.stack(torch._foreach_norm([*chain(*blocks)])).double()
    norms: list[float] = torch.stack([own.norm() for own in torch.split(of_blocks, [*map(len, blocks)])]).tolist()
    return [
        norm if math.isfinite(norm) else float(torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).norm())
        for norm, own in zip(norms, blocks, strict=True)
    ]


def step_metrics(grad_norm: float, learning_rate: float, steps_before: int) -> dict[str, float]:
    """The metrics of a step, for every optimizer; `grad_norm` is the norm before clipping."""
    return {
        "grad_norm:mean": grad_norm,
        "learning_rate:mean": learning_rate,
        "step:max": float(steps_before + 1),
    }


def _fused(adam: Adam, group: list[tuple[Step, Tensor]]) -> None:
    """One fused call over several arenas, each with the count of its steps. On a CPU 5 times as fast as torch._foreach,
    because it passes over each arena once."""
    torch._fused_adamw_(
        [s.weights for s, _ in group],
        [s.grad for s, _ in group],
        [s.m for s, _ in group],
        [s.v for s, _ in group],
        [],
        [count for _, count in group],
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        amsgrad=False,
        maximize=False,
    )
