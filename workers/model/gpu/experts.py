"""A mixture of frozen experts that carries many adapters at once, on a CUDA device: what `workers.model.moe` computes
on a CPU, with one grouped GEMM for the base and one launch per low-rank product for all (expert, group) runs.

Of the shared-outer factors the A of gate and up is applied once per token and the B of down once per token, after the
choices are combined; only r-wide rows are permuted.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, D hidden, F expert width, G = 2F, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.gpu.grouped import per_expert
from workers.model.gpu.launch import Place, Precision, expand, outer, shrink
from workers.model.gpu.linear import table_for
from workers.model.gpu.runs import EXPERT_ROWS, Runs, Table
from workers.model.lora_rows import LoraRows

if TYPE_CHECKING:
    from workers.model.moe import Names


def expert_block(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    names: Names,
    rows: LoraRows | None,
) -> Tensor:
    """As workers.model.moe.expert_block."""
    table = table_for(rows, names.gate_up_a, x_TD.device)
    trigger = rows.trigger(rows.groups(names.gate_up_a)) if rows is not None and table is not None else None
    plan = _Plan.of(experts_TK, gate_up_EGD, table, names)
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        out = _ExpertBlock.apply(x_TD, weights_TK, trigger, gate_up_EGD, down_EDF, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)
    return _forward(x_TD, weights_TK, gate_up_EGD, down_EDF, plan)[0]


class _Routing(NamedTuple):
    """Sorted position -> token * choices + choice (`order`), the way back, the token of each pair, and where the pairs
    of each expert end."""

    order: Tensor
    inverse: Tensor
    token: Tensor
    ends_E: Tensor


class _Adapters(NamedTuple):
    """Where the adapters find their rows, per token and per (expert, group) run."""

    table: Table
    runs: Runs
    dense: Place
    paired: Place
    scale_T1: Tensor


class _Plan(NamedTuple):
    routing: _Routing
    adapters: _Adapters | None
    names: Names
    precision: Precision

    @classmethod
    def of(cls, experts_TK: Tensor, weight_EOI: Tensor, table: Table | None, names: Names) -> _Plan:
        """One stable sort by expert of group-major pairs: runs of (expert, group) come out contiguous."""
        num_experts, choices, device = len(weight_EOI), experts_TK.shape[1], experts_TK.device
        sorted_P, order = torch.sort(experts_TK.reshape(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=device)
        token = torch.div(order, choices, rounding_mode="floor")
        ends = torch.searchsorted(sorted_P, torch.arange(num_experts, device=device), right=True)
        routing = _Routing(order, inverse, token, ends.to(torch.int32))
        adapters = None
        if table is not None:
            groups, group_T = table.runs.num_groups, table.group_T
            run_P = sorted_P * groups + group_T[token]
            start = torch.searchsorted(run_P, torch.arange(num_experts * groups + 1, device=device))
            runs = Runs(start, groups, num_experts, len(order), EXPERT_ROWS)
            dense = Place.dense(table, names.gate_up_a)
            paired = Place.experts(table, runs, names.gate_up_a)
            adapters = _Adapters(table, runs, dense, paired, table.scales_G[group_T][:, None])
        return cls(routing, adapters, names, Precision.beside(weight_EOI.dtype))


def _forward(
    x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output, and what the backward needs: the pre-activations of gate and up, scale * x A^T per token [T, 2r] and
    scale * (sum of weighted h A^T) per token [T, r]."""
    routing, adapters, names = plan.routing, plan.adapters, plan.names
    f = down_EDF.shape[2]
    x_PD = x_TD.to(gate_up_EGD.dtype)[routing.token]
    gate_up_PG = per_expert(x_PD, gate_up_EGD, routing.ends_E).to(x_TD.dtype)
    u_T = combined_T = None
    if adapters is not None:
        u_T = x_TD.new_zeros(len(x_TD), 2 * adapters.table.max_rank, dtype=torch.float32)
        shrink(x_TD, u_T, adapters.dense, names.gate_up_a, plan.precision, stack=2, scaled=True)
        u_P = u_T[routing.token]
        for part, name in enumerate((names.gate_b, names.up_b)):
            y_PF = gate_up_PG[:, part * f : part * f + f]
            expand(y_PF, u_P, adapters.paired, name, plan.precision, part=part, scaled=False)
    h_PF = F.silu(gate_up_PG[:, :f]) * gate_up_PG[:, f:]
    y_PD = per_expert(h_PF, down_EDF, routing.ends_E)
    out_TD = _combine(y_PD.to(x_TD.dtype), weights_TK, routing)
    if adapters is not None:
        v_P = h_PF.new_zeros(len(h_PF), adapters.table.max_rank, dtype=torch.float32)
        shrink(h_PF, v_P, adapters.paired, names.down_a, plan.precision, scaled=False)
        combined_T = _combine(v_P, weights_TK, routing) * adapters.scale_T1
        expand(out_TD, combined_T, adapters.dense, names.down_b, plan.precision, scaled=False)
    return out_TD, gate_up_PG, u_T, combined_T


def _combine(y_PO: Tensor, weights_TK: Tensor, routing: _Routing) -> Tensor:
    """Add up the choices of each token by their weights."""
    y_TKO = y_PO[routing.inverse].view(*weights_TK.shape, -1)
    return torch.bmm(weights_TK[:, None, :], y_TKO).squeeze(1)


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
        dout_TD, routing = dout_TD.contiguous(), plan.routing
        f = down_EDF.shape[2]
        gate, up = gate_up_PG[:, :f], gate_up_PG[:, f:]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h_PF = silu * up
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]

        dout_PD = dout_TD.to(down_EDF.dtype)[routing.token]
        dh_PF = per_expert(dout_PD, down_EDF, routing.ends_E, transposed=True).to(x_TD.dtype)  # before the weight
        if plan.adapters is not None:
            _down_backward(dh_PF, dout_TD, h_PF, weights_P1, combined_T, plan, plan.adapters)
        dweights_TK = (dh_PF * h_PF).sum(-1)[routing.inverse].view_as(weights_TK)
        dh_PF *= weights_P1

        dgate_up_PG = torch.empty_like(gate_up_PG)
        torch.mul(dh_PF, silu, out=dgate_up_PG[:, f:])
        torch.mul(dh_PF * up, sigmoid * (1 + gate * (1 - sigmoid)), out=dgate_up_PG[:, :f])
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_PD = per_expert(dgate_up_PG, gate_up_EGD, routing.ends_E, transposed=True)
            dx_TKD = dx_PD[routing.inverse].view(*weights_TK.shape, -1)
            dx_TD = dx_TKD.sum(1, dtype=x_TD.dtype)
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
    names, precision = plan.names, plan.precision
    dv_T = torch.zeros_like(combined_T)
    shrink(dout_TD, dv_T, adapters.dense, names.down_b, precision, scaled=True)
    outer(combined_T, dout_TD, adapters.dense, names.down_b, precision, scaled=False)
    dv_P = dv_T[plan.routing.token]
    expand(dh_PF, dv_P, adapters.paired, names.down_a, precision, scaled=False)
    dv_P *= weights_P1
    outer(dv_P, h_PF, adapters.paired, names.down_a, precision, scaled=False)


def _gate_up_backward(
    dx_TD: Tensor | None, dgate_up_PG: Tensor, x_TD: Tensor, u_T: Tensor, plan: _Plan, adapters: _Adapters
) -> None:
    """Add to dx in place and to the gradients of the gate and up factors."""
    names, precision, routing = plan.names, plan.precision, plan.routing
    f = dgate_up_PG.shape[1] // 2
    u_P = u_T[routing.token]
    du_P = torch.zeros_like(u_P)
    for part, name in enumerate((names.gate_b, names.up_b)):
        dy_PF = dgate_up_PG[:, part * f : part * f + f]
        shrink(dy_PF, du_P, adapters.paired, name, precision, part=part, scaled=False)
        outer(u_P, dy_PF, adapters.paired, name, precision, part=part, scaled=False)
    choices = len(routing.token) // len(x_TD)
    du_T = du_P[routing.inverse].view(len(x_TD), choices, -1).sum(1) * adapters.scale_T1
    outer(du_T, x_TD, adapters.dense, names.gate_up_a, precision, stack=2, scaled=False)
    if dx_TD is not None:
        expand(dx_TD, du_T, adapters.dense, names.gate_up_a, precision, stack=2, scaled=False)
