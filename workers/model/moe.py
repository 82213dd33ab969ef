"""A mixture of frozen experts that carries many adapters at once.

One stable sort by expert of group-major (token, choice) pairs makes both the rows of an expert and, inside them, the
rows of an (expert, group) pair contiguous. The base runs over everybody's rows, expert by expert; the adapters add
their low-rank parts, all groups in one call for each factor. Of the shared-outer factors the A of gate and up is
applied once per token and the B of down once per token, after the choices are combined; only r-wide rows are permuted.
The backward keeps the gate and up pre-activations, not the expert outputs: the gradient of a router weight is
<d out / d h, h> (SonicMoE, arXiv 2512.14080).

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, D hidden, F expert width, G = 2F, r rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.lora import own_rows
from workers.model.lora_rows import LoraRows
from workers.model.per_expert import per_expert
from workers.model.place import Place, place_of
from workers.model.routing import Routing


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
    if rows is not None and rows.apart:
        own = zip(*(own_rows(t, rows) for t in (x_TD, weights_TK, experts_TK)), rows.singles, strict=True)
        return torch.cat([expert_block(x, w, e, gate_up_EGD, down_EDF, names, single) for x, w, e, single in own])
    routing = Routing(experts_TK, gate_up_EGD.shape[0])
    plan = _Plan(routing, names, _Adapters.of(rows, routing, names, gate_up_EGD))
    trigger = rows.trigger(rows.groups(names.gate_up_a)) if rows is not None and plan.adapters is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        out = _ExpertBlock.apply(x_TD, weights_TK, trigger, gate_up_EGD, down_EDF, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)
    return _forward(x_TD.contiguous(), weights_TK, gate_up_EGD, down_EDF, plan)[0]


class _Adapters(NamedTuple):
    """Where the adapters find their rows: per token and per (expert, group) run; and the scale of each token."""

    dense: Place
    paired: Place
    scale_T1: Tensor

    @classmethod
    def of(cls, rows: LoraRows | None, routing: Routing, names: Names, weight: Tensor) -> _Adapters | None:
        dense = place_of(rows, names.gate_up_a, weight)
        if rows is None or dense is None:
            return None
        return cls(dense, dense.experts(routing, rows), rows.scale_of_row(routing.experts.device)[:, None])


class _Plan(NamedTuple):
    routing: Routing
    names: Names
    adapters: _Adapters | None


def _base(x_PI: Tensor, weight_EOI: Tensor, routing: Routing, *, transposed: bool = False) -> Tensor:
    """Each sorted row times the frozen weight of its expert, float32."""
    return per_expert(x_PI, weight_EOI, routing.ends_E, transposed=transposed).to(torch.float32)


def _forward(
    x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output, and what the backward needs: the pre-activations of gate and up, scale * x A^T per token [T, 2r] and
    scale * (sum of weighted h A^T) per token [T, r]."""
    routing, adapters, names = plan.routing, plan.adapters, plan.names
    f = down_EDF.shape[2]
    gate_up_PG = _base(x_TD.to(gate_up_EGD.dtype)[routing.token], gate_up_EGD, routing)
    u_T = combined_T = None
    if adapters is not None:
        u_T = x_TD.new_zeros(len(x_TD), 2 * adapters.dense.max_rank)
        adapters.dense.shrink(x_TD, u_T, names.gate_up_a, stack=2, scaled=True)
        u_P = u_T[routing.token]
        for part, name in enumerate((names.gate_b, names.up_b)):
            adapters.paired.expand(gate_up_PG[:, part * f : part * f + f], u_P, name, part=part, scaled=False)
    h_PF = F.silu(gate_up_PG[:, :f]) * gate_up_PG[:, f:]
    y_TKD = _per_token(_base(h_PF, down_EDF, routing), routing)
    out_TD = torch.bmm(weights_TK[:, None, :], y_TKD).squeeze(1)
    if adapters is not None:
        v_P = h_PF.new_zeros(len(h_PF), adapters.dense.max_rank)
        adapters.paired.shrink(h_PF, v_P, names.down_a, scaled=False)
        combined_T = (_per_token(v_P, routing) * weights_TK[:, :, None]).sum(1) * adapters.scale_T1
        adapters.dense.expand(out_TD, combined_T, names.down_b, scaled=False)
    return out_TD, gate_up_PG, u_T, combined_T


def _per_token(x_PI: Tensor, routing: Routing) -> Tensor:
    """[P, I] sorted by expert -> [T, K, I]."""
    return x_PI[routing.inverse].view(-1, routing.choices, x_PI.shape[1])


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
        x_TD = x_TD.contiguous()
        out_TD, *small = _forward(x_TD, weights_TK, gate_up_EGD, down_EDF, plan)
        ctx.save_for_backward(x_TD, weights_TK, gate_up_EGD, down_EDF, *small)
        ctx.plan = plan
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG, u_T, combined_T = ctx.saved_tensors
        plan: _Plan = ctx.plan
        routing = plan.routing
        dout_TD = dout_TD.contiguous()
        f = down_EDF.shape[2]
        gate, up = gate_up_PG[:, :f], gate_up_PG[:, f:]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h_PF = silu * up
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]

        dout_PD = dout_TD.to(down_EDF.dtype)[routing.token]
        dh_PF = _base(dout_PD, down_EDF, routing, transposed=True)  # before the router weight
        if plan.adapters is not None:
            _down_backward(dh_PF, dout_TD, h_PF, weights_P1, combined_T, plan, plan.adapters)
        dweights_TK = (dh_PF * h_PF).sum(-1)[routing.inverse].view_as(weights_TK)
        dh_PF *= weights_P1

        dgate_up_PG = torch.empty_like(gate_up_PG)
        torch.mul(dh_PF, silu, out=dgate_up_PG[:, f:])
        torch.mul(dh_PF * up, sigmoid * (1 + gate * (1 - sigmoid)), out=dgate_up_PG[:, :f])
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_TD = _per_token(_base(dgate_up_PG, gate_up_EGD, routing, transposed=True), routing).sum(1)
        if plan.adapters is not None:
            _gate_up_backward(dx_TD, dgate_up_PG, x_TD, u_T, plan, plan.adapters)
        return dx_TD, dweights_TK, None, None, None, None


def _down_backward(
    dh_PF: Tensor,
    dout_TD: Tensor,
    h_PF: Tensor,
    weights_P1: Tensor,
    combined_T: Tensor,
    plan: _Plan,
    adapters: _Adapters,
) -> None:
    """Add to dh in place, before the router weight is applied to it, and to the gradients of the down factors."""
    names, dv_T = plan.names, torch.zeros_like(combined_T)
    adapters.dense.shrink(dout_TD, dv_T, names.down_b, scaled=True)
    adapters.dense.outer(combined_T, dout_TD, names.down_b, scaled=False)
    dv_P = dv_T[plan.routing.token]
    adapters.paired.expand(dh_PF, dv_P, names.down_a, scaled=False)
    dv_P *= weights_P1
    adapters.paired.outer(dv_P, h_PF, names.down_a, scaled=False)


def _gate_up_backward(
    dx_TD: Tensor | None, dgate_up_PG: Tensor, x_TD: Tensor, u_T: Tensor, plan: _Plan, adapters: _Adapters
) -> None:
    """Add to dx in place and to the gradients of the gate and up factors."""
    names, routing, f = plan.names, plan.routing, dgate_up_PG.shape[1] // 2
    u_P = u_T[routing.token]
    du_P = torch.zeros_like(u_P)
    for part, name in enumerate((names.gate_b, names.up_b)):
        dy_PF = dgate_up_PG[:, part * f : part * f + f]
        adapters.paired.shrink(dy_PF, du_P, name, part=part, scaled=False)
        adapters.paired.outer(u_P, dy_PF, name, part=part, scaled=False)
    du_T = _per_token(du_P, routing).sum(1) * adapters.scale_T1
    adapters.dense.outer(du_T, x_TD, names.gate_up_a, stack=2, scaled=False)
    if dx_TD is not None:
        adapters.dense.expand(dx_TD, du_T, names.gate_up_a, stack=2, scaled=False)
