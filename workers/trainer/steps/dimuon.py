"""Dimuon on the flat arenas: momentum whose update is orthogonalised, matrix by matrix. stepping.py calls it.

For every LoRA matrix W with gradient G:

    M <- beta1 M + (1 - beta1) G
    W <- W - learning_rate * U V^T        where M = U S V^T

Each expert's matrix, and each of the stacked A factors, is a matrix of its own. A step moves W by a direction whose
singular values are all 1, so the direction's Frobenius norm is sqrt(rank) whatever the scale of the gradient, and no
bias correction is needed. U V^T is computed by Newton-Schulz iterations, as in Muon (Keller Jordan, "Muon: An optimizer
for hidden layers in neural networks").

The learning rate multiplies the direction unscaled, as Tinker's reference says of its Dimuon: the factor 0.2
sqrt(max(rows, columns)) of arXiv 2502.16982 is not applied. Tinker publishes no more than that, so the formula is ours
(docs/losses.md).

Invariant (isolation): a run's result is bitwise the same whichever runs step with it. Matrices of one shape are batched
within a run but never across runs, because a batched product may round differently in a larger batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.adapters.shape import AdapterShape
from workers.trainer.steps.adamw import changing, clip_gradients, clip_scale, norms_of, step_metrics

#: Five steps of Muon's quintic bring every singular value above about 1/500 of the Frobenius norm to 0.7 .. 1.2; the
#: cubic then converges quadratically to 1, and four steps leave an error of about 1e-6.
QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS = 5
CUBIC_STEPS = 4

#: The most elements that a CPU iterates on at once, so that they stay in its cache (1 MiB).
CACHED = 1 << 18


@dataclass(frozen=True)
class Dimuon:
    """Hyperparameters of one step. `grad_clip_norm`: upper bound of the L2 norm of the whole gradient that enters the
    momentum; 0 or less = no clipping."""

    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0


@dataclass
class DimuonStep:
    """One due update. The arenas have the layout of `shape` and are changed in place, `grad` too (by clipping).
    `step` is the number of updates made before this one."""

    params: Dimuon
    shape: AdapterShape
    weights: Tensor
    m: Tensor
    grad: Tensor
    step: int


def step_dimuon(step: DimuonStep) -> dict[str, float]:
    """Update a run and return its metrics. Out of memory is raised before anything has changed."""
    params = step.params
    (norm,) = norms_of([step.grad])
    scale = clip_scale(norm, max(0.0, params.grad_clip_norm))
    moves = _moves(step, scale)
    with changing():
        clip_gradients([(step.grad, scale)])
        step.m.mul_(params.beta1).add_(step.grad.mul_(1 - params.beta1))
        for weights, direction in moves:
            weights.sub_(direction, alpha=params.learning_rate)
    return step_metrics(norm, params.learning_rate, step.step)


def _moves(step: DimuonStep, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Views of the weights, and for each its direction U V^T, in new memory. Changes no arena."""
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    arenas = (matrices(step.shape, flat) for flat in (step.weights, step.m, step.grad))
    for weights, m, grad in zip(*arenas, strict=True):
        by_shape[weights.shape[1], weights.shape[2]].append((weights, m, grad))
    moves: list[tuple[Tensor, Tensor]] = []
    for (rows, columns), of_shape in by_shape.items():
        some_weights, some_m, some_grad = zip(*of_shape, strict=True)
        momenta = torch.cat(some_m).mul_(step.params.beta1)
        momenta.add_(torch.cat(some_grad).mul_(scale).mul_(1 - step.params.beta1))
        at_once = max(1, CACHED // (rows * columns)) if momenta.device.type == "cpu" else len(momenta)
        for part in torch.split(momenta, at_once):
            part.copy_(orthogonal(part))
        moves += zip(some_weights, torch.split(momenta, [len(w) for w in some_weights]), strict=True)
    return moves


def matrices(shape: AdapterShape, flat: Tensor) -> list[Tensor]:
    """Views [N, rows, columns] of an arena, one for each tensor: N matrices for the optimizer. An A factor that feeds
    several products (qkv, or gate and up) is as many matrices of `rank` rows; a tensor of experts is one matrix per
    expert. A B factor is used as stored, [r, out]: the direction of a transpose is the transposed direction."""
    views = []
    for slot in shape.slots.values():
        view = flat[slot.offset : slot.offset + slot.numel]
        views.append(view.view(-1, shape.rank, slot.stored_shape[-1]))
    return views


def orthogonal(x_NIJ: Tensor) -> Tensor:
    """U V^T for every matrix x = U S V^T; zeros for a matrix of zeros. Singular values below about a thousandth of the
    matrix's Frobenius norm come out smaller than 1."""
    if x_NIJ.shape[1] > x_NIJ.shape[2]:
        return orthogonal(x_NIJ.mT).mT
    # Scaled by the largest entry first: squares of small gradients would underflow in the norm.
    largest = x_NIJ.abs().amax(dim=(1, 2), keepdim=True)
    x_NIJ = x_NIJ / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = torch.linalg.vector_norm(x_NIJ, dim=(1, 2), keepdim=True)
    x_NIJ = x_NIJ / torch.where(norm > 0, norm, torch.ones_like(norm))
    a, b, c = QUINTIC
    for _ in range(QUINTIC_STEPS):
        gram = torch.bmm(x_NIJ, x_NIJ.mT)
        x_NIJ = torch.baddbmm(x_NIJ, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x_NIJ, beta=a)
    for _ in range(CUBIC_STEPS):
        x_NIJ = torch.baddbmm(x_NIJ, torch.bmm(x_NIJ, x_NIJ.mT), x_NIJ, beta=1.5, alpha=-0.5)
    return x_NIJ
