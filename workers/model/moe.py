"""A mixture of frozen experts that carries many adapters at once.

One stable sort by expert of group-major (token, choice) pairs makes both the rows of an expert and, inside them, the
rows of an (expert, group) pair contiguous. The base runs one product per expert over everybody's rows; each group adds
its own low-rank part to its runs, from tensors that hold only its rows. Of the shared-outer factors the A of gate and
up is applied once per token and the B of down once per token, after the choices are combined; only r-wide rows are
permuted. The backward keeps the gate and up pre-activations, not the expert outputs: the gradient of a router weight is
<d out / d h, h> (SonicMoE, arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.lora import Group, LoraRows, base_mm
from workers.model.lora_gather import SeatedExperts


class Run(NamedTuple):
    """Consecutive sorted pairs of one expert and one group: start:stop among all pairs, own:own_stop among the
    group's."""

    expert: int
    start: int
    stop: int
    own: int
    own_stop: int


@dataclass(frozen=True)
class GroupPairs:
    """The pairs of one group, by expert. `positions` [pairs] among all sorted pairs, `flat` [pairs] is
    token * choices + choice counted from the group's first token."""

    group: Group
    positions: Tensor
    flat: Tensor
    choices: int
    runs: list[Run]

    @cached_property
    def token(self) -> Tensor:
        return self.flat // self.choices

    def combine(self, own_PR: Tensor) -> Tensor:
        """Add up the choices of each token: [pairs, r] -> [tokens, r]."""
        by_token = torch.empty_like(own_PR)
        by_token[self.flat] = own_PR
        return by_token.view(-1, self.choices, own_PR.shape[1]).sum(1)


class Routing:
    """How one batch is spread over the experts. P = tokens * choices pairs, sorted by expert, stable.

    `order` [P]: sorted position -> token * choices + choice; `inverse` [P] the other way; `token` [P] of each sorted
    pair; `expert_offsets` cuts the sorted pairs by expert.
    """

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        self.choices, self.num_experts = experts_TK.shape[1], num_experts
        experts = experts_TK.reshape(-1)
        self.order = torch.argsort(experts, stable=True)
        self.experts = experts[self.order]
        self.token = self.order // self.choices
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(len(experts), device=experts.device)
        counts = torch.bincount(experts, minlength=num_experts)
        self.expert_offsets: list[int] = [0, *counts.cumsum(0).tolist()]

    def pairs(self, rows: LoraRows | None, groups: list[Group]) -> list[GroupPairs]:
        """The pairs of each of `groups`, and their runs."""
        if rows is None or not groups:
            return []
        num_groups = len(rows.adapters)
        group_P = rows.group_of_row(self.token.device)[self.token]
        by_group = torch.argsort(group_P, stable=True)
        counts = torch.bincount(self.experts * num_groups + group_P, minlength=self.num_experts * num_groups)
        table: list[list[int]] = counts.view(self.num_experts, num_groups).t().tolist()
        starts: list[list[int]] = (counts.cumsum(0) - counts).view(self.num_experts, num_groups).t().tolist()
        found = []
        for group in groups:
            positions = by_group[group.start * self.choices : group.stop * self.choices]
            flat = self.order[positions] - group.start * self.choices
            runs, own = [], 0
            for expert, (count, start) in enumerate(zip(table[group.index], starts[group.index], strict=True)):
                if count:
                    runs.append(Run(expert, start, start + count, own, own + count))
                    own += count
            found.append(GroupPairs(group, positions, flat, self.choices, runs))
        return found


class Names(NamedTuple):
    """The adapter tensors of one layer's MLP."""

    gate_up_a: str
    gate_b: str
    up_b: str
    down_a: str
    down_b: str

    @classmethod
    def of_layer(cls, layer: int) -> Names:
        return cls(*(f"layers.{layer}.mlp.{t}" for t in ("gate_up_A", "gate_B", "up_B", "down_A", "down_B")))


def expert_block(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    names: Names,
    rows: LoraRows | None,
) -> Tensor:
    """sum_k weights[:, k] * down_e(silu(gate_e x) * up_e x) with e = experts[:, k]; gate_up_EGD stacks gate over up
    (G = 2F). Differentiable in x and weights; gradients of adapters go to `rows.grads`."""
    routing = Routing(experts_TK, gate_up_EGD.shape[0])
    groups = rows.groups(names.gate_up_a) if rows is not None else []
    trigger = rows.trigger(groups) if rows is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        plan = _Plan(routing, routing.pairs(rows, groups), names)
        out = _ExpertBlock.apply(x_TD, weights_TK, trigger, gate_up_EGD, down_EDF, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)
    groups, seated = rows.forward_groups(names.gate_up_a) if rows is not None else ([], [])
    experts = [SeatedExperts(some, names, routing, weights_TK) for some in seated]
    plan = _Plan(routing, routing.pairs(rows, groups), names, experts)
    return _forward(x_TD, weights_TK, gate_up_EGD, down_EDF, plan)[0]


class _Plan(NamedTuple):
    routing: Routing
    pairs: list[GroupPairs]
    names: Names
    seated: Sequence[SeatedExperts] = ()


def _per_expert(x_PI: Tensor, weight_EOI: Tensor, routing: Routing, *, transposed: bool = False) -> Tensor:
    """Each sorted row times the weight of its expert."""
    y_PO = x_PI.new_empty(x_PI.shape[0], weight_EOI.shape[2 if transposed else 1])
    offsets = routing.expert_offsets
    for expert in range(routing.num_experts):
        a, b = offsets[expert], offsets[expert + 1]
        if b > a:
            y_PO[a:b] = base_mm(x_PI[a:b], weight_EOI[expert], transposed=transposed)
    return y_PO


def _forward(
    x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, and what the backward needs: the pre-activations of gate and up, and two small tensors per group."""
    routing, names = plan.routing, plan.names
    f, choices = down_EDF.shape[2], routing.choices
    gate_up_PG = _per_expert(x_TD[routing.token], gate_up_EGD, routing)
    us = [_gate_up_forward(gate_up_PG, x_TD, own, names) for own in plan.pairs]
    for seated in plan.seated:
        seated.gate_up(gate_up_PG, x_TD)
    h_PF = F.silu(gate_up_PG[:, :f]) * gate_up_PG[:, f:]
    y_PD = _per_expert(h_PF, down_EDF, routing)
    y_TKD = y_PD[routing.inverse].view(-1, choices, y_PD.shape[1])
    out_TD = torch.bmm(weights_TK[:, None, :], y_TKD).squeeze(1)
    combined = [_down_forward(out_TD, h_PF, weights_TK, own, names) for own in plan.pairs]
    for seated in plan.seated:
        seated.down(out_TD, h_PF)
    return out_TD, gate_up_PG, us + combined


def _gate_up_forward(gate_up_PG: Tensor, x_TD: Tensor, own: GroupPairs, names: Names) -> Tensor:
    """Add a group's gate and up parts in place. Returns x A^T per pair [pairs, 2r]."""
    group, r, f = own.group, own.group.adapter.rank, gate_up_PG.shape[1] // 2
    u = torch.mm(x_TD[group.start : group.stop], group.adapter.view(names.gate_up_a).t())[own.token]
    gate_b, up_b = group.adapter.view(names.gate_b), group.adapter.view(names.up_b)
    for e, start, stop, a, b in own.runs:
        rows = gate_up_PG[start:stop]
        rows[:, :f].addmm_(u[a:b, :r], gate_b[e].t(), alpha=group.scale)
        rows[:, f:].addmm_(u[a:b, r:], up_b[e].t(), alpha=group.scale)
    return u


def _down_forward(out_TD: Tensor, h_PF: Tensor, weights_TK: Tensor, own: GroupPairs, names: Names) -> Tensor:
    """Add a group's down part in place. Returns the choices' h A^T, weighted and added up, [tokens, r]."""
    group, adapter = own.group, own.group.adapter
    v = h_PF.new_empty(len(own.positions), adapter.rank)
    down_a = adapter.view(names.down_a)
    for e, start, stop, a, b in own.runs:
        torch.mm(h_PF[start:stop], down_a[e].t(), out=v[a:b])
    weights = weights_TK[group.start : group.stop].reshape(-1)[own.flat]
    combined = own.combine(v * weights[:, None])
    out_TD[group.start : group.stop].addmm_(combined, adapter.view(names.down_b).t(), alpha=group.scale)
    return combined


class _ExpertBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        trigger: Tensor | None,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
        plan: _Plan,
    ) -> Tensor:
        out_TD, gate_up_PG, small = _forward(x_TD, weights_TK, gate_up_EGD, down_EDF, plan)
        ctx.save_for_backward(x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG, *small)
        ctx.plan = plan
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG, *small = ctx.saved_tensors
        plan: _Plan = ctx.plan
        routing, names, us, combined = plan.routing, plan.names, small[: len(plan.pairs)], small[len(plan.pairs) :]
        dout_TD = dout_TD.contiguous()
        f = down_EDF.shape[2]
        gate, up = gate_up_PG[:, :f], gate_up_PG[:, f:]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h_PF = silu * up
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]

        dh_PF = _per_expert(dout_TD[routing.token], down_EDF, routing, transposed=True)  # before the router weight
        for own, combined_TR in zip(plan.pairs, combined, strict=True):
            _down_backward(dh_PF, dout_TD, h_PF, weights_P1, combined_TR, own, names)
        dweights_TK = (dh_PF * h_PF).sum(-1)[routing.inverse].view_as(weights_TK)
        dh_PF *= weights_P1

        dgate_up_PG = torch.empty_like(gate_up_PG)
        torch.mul(dh_PF, silu, out=dgate_up_PG[:, f:])
        torch.mul(dh_PF * up, sigmoid * (1 + gate * (1 - sigmoid)), out=dgate_up_PG[:, :f])
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_PD = _per_expert(dgate_up_PG, gate_up_EGD, routing, transposed=True)
            dx_TD = dx_PD[routing.inverse].view(-1, routing.choices, dx_PD.shape[1]).sum(1)
        for own, u in zip(plan.pairs, us, strict=True):
            _gate_up_backward(dx_TD, dgate_up_PG, x_TD, u, own, names)
        return dx_TD, dweights_TK, None, None, None, None


def _down_backward(
    dh_PF: Tensor, dout_TD: Tensor, h_PF: Tensor, weights_P1: Tensor, combined_TR: Tensor, own: GroupPairs, names: Names
) -> None:
    group, adapter, grad = own.group, own.group.adapter, own.group.grad
    dout = dout_TD[group.start : group.stop]
    dv = (torch.mm(dout, adapter.view(names.down_b)) * group.scale)[own.token]
    down_a = adapter.view(names.down_a)
    for e, start, stop, a, b in own.runs:
        dh_PF[start:stop].addmm_(dv[a:b], down_a[e])
    if grad is not None:
        grad.view(names.down_b).addmm_(dout.t(), combined_TR, alpha=group.scale)
        weighted, ddown_a = dv * weights_P1[own.positions], grad.view(names.down_a)
        for e, start, stop, a, b in own.runs:
            ddown_a[e].addmm_(weighted[a:b].t(), h_PF[start:stop])


def _gate_up_backward(
    dx_TD: Tensor | None, dgate_up_PG: Tensor, x_TD: Tensor, u: Tensor, own: GroupPairs, names: Names
) -> None:
    group, adapter, r, f = own.group, own.group.adapter, own.group.adapter.rank, dgate_up_PG.shape[1] // 2
    du_P = torch.empty_like(u)
    gate_b, up_b = adapter.view(names.gate_b), adapter.view(names.up_b)
    for e, start, stop, a, b in own.runs:
        dgate, dup = dgate_up_PG[start:stop, :f], dgate_up_PG[start:stop, f:]
        torch.mm(dgate, gate_b[e], out=du_P[a:b, :r])
        torch.mm(dup, up_b[e], out=du_P[a:b, r:])
        if group.grad is not None:
            group.grad.view(names.gate_b)[e].addmm_(dgate.t(), u[a:b, :r], alpha=group.scale)
            group.grad.view(names.up_b)[e].addmm_(dup.t(), u[a:b, r:], alpha=group.scale)
    du = own.combine(du_P * group.scale)
    if group.grad is not None:
        group.grad.view(names.gate_up_a).addmm_(du.t(), x_TD[group.start : group.stop])
    if dx_TD is not None:
        dx_TD[group.start : group.stop].addmm_(du, adapter.view(names.gate_up_a))
