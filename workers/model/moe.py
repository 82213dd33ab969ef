"""A mixture of frozen experts that carries many adapters at once.

One stable sort by expert of group-major (token, choice) pairs makes both the rows of an expert and, inside them, the
rows of an (expert, group) pair contiguous. The base runs one product per expert over everybody's rows; the adapters add
their low-rank parts from tensors that hold only their own group's rows (moe_adapters.py). The backward keeps the gate
and up pre-activations, not the expert outputs: the gradient of a router weight is <d out / d h, h> (SonicMoE,
arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.base_mm import base_mm
from workers.model.lora import own_rows
from workers.model.lora_gather import SeatedExperts
from workers.model.lora_rows import LoraRows
from workers.model.moe_adapters import Names, down_backward, down_forward, gate_up_backward, gate_up_forward
from workers.model.moe_slots import Bucket, buckets
from workers.model.routing import Routing

__all__ = ["Names", "expert_block"]


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
    if x_TD.is_cuda:
        from workers.model.gpu.experts import expert_block as on_device  # Triton: only a GPU needs it

        return on_device(x_TD, weights_TK, experts_TK, gate_up_EGD, down_EDF, names, rows)
    routing = Routing(experts_TK, gate_up_EGD.shape[0])
    groups = rows.groups(names.gate_up_a) if rows is not None else []
    trigger = rows.trigger(groups) if rows is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        plan = _Plan(routing, buckets(routing, rows, groups), names)
        out = _ExpertBlock.apply(x_TD, weights_TK, trigger, gate_up_EGD, down_EDF, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)
    groups, seated = rows.forward_groups(names.gate_up_a) if rows is not None else ([], [])
    experts = [SeatedExperts(some, names, routing, weights_TK) for some in seated]
    plan = _Plan(routing, buckets(routing, rows, groups), names, experts)
    return _forward(x_TD, weights_TK, gate_up_EGD, down_EDF, plan)[0]


class _Plan(NamedTuple):
    routing: Routing
    buckets: list[Bucket]
    names: Names
    seated: Sequence[SeatedExperts] = ()


def _per_expert(x_PI: Tensor, weight_EOI: Tensor, routing: Routing, *, transposed: bool = False) -> Tensor:
    """Each sorted row times the weight of its expert."""
    y_PO = x_PI.new_empty(x_PI.shape[0], weight_EOI.shape[2 if transposed else 1])
    offsets = routing.expert_offsets
    for expert in range(routing.num_experts):
        a, b = offsets[expert], offsets[expert + 1]
        if b > a:
            base_mm(x_PI[a:b], weight_EOI[expert], transposed=transposed, out=y_PO[a:b])
    return y_PO


def _forward(
    x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, and what the backward needs: the pre-activations of gate and up, and two small tensors per bucket."""
    routing, names = plan.routing, plan.names
    f, choices = down_EDF.shape[2], routing.choices
    gate_up_PG = _per_expert(x_TD[routing.token], gate_up_EGD, routing)
    us = [gate_up_forward(gate_up_PG, x_TD, bucket, names) for bucket in plan.buckets]
    for seated in plan.seated:
        seated.gate_up(gate_up_PG, x_TD)
    h_PF = F.silu(gate_up_PG[:, :f]) * gate_up_PG[:, f:]
    y_PD = _per_expert(h_PF, down_EDF, routing)
    y_TKD = y_PD[routing.inverse].view(-1, choices, y_PD.shape[1])
    out_TD = torch.bmm(weights_TK[:, None, :], y_TKD).squeeze(1)
    combined = [down_forward(out_TD, h_PF, weights_TK, bucket, names) for bucket in plan.buckets]
    for seated in plan.seated:
        seated.down(out_TD, h_PF)
    return out_TD, gate_up_PG, us + combined


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
        routing, names, us, combined = plan.routing, plan.names, small[: len(plan.buckets)], small[len(plan.buckets) :]
        dout_TD = dout_TD.contiguous()
        f = down_EDF.shape[2]
        gate, up = gate_up_PG[:, :f], gate_up_PG[:, f:]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h_PF = silu * up
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]

        dh_PF = _per_expert(dout_TD[routing.token], down_EDF, routing, transposed=True)  # before the router weight
        for bucket, combined_TR in zip(plan.buckets, combined, strict=True):
            down_backward(dh_PF, dout_TD, h_PF, weights_P1, combined_TR, bucket, names)
        dweights_TK = (dh_PF * h_PF).sum(-1)[routing.inverse].view_as(weights_TK)
        dh_PF *= weights_P1

        dgate_up_PG = torch.empty_like(gate_up_PG)
        torch.mul(dh_PF, silu, out=dgate_up_PG[:, f:])
        torch.mul(dh_PF * up, sigmoid * (1 + gate * (1 - sigmoid)), out=dgate_up_PG[:, :f])
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_PD = _per_expert(dgate_up_PG, gate_up_EGD, routing, transposed=True)
            dx_TD = dx_PD[routing.inverse].view(-1, routing.choices, dx_PD.shape[1]).sum(1)
        for bucket, u_QR in zip(plan.buckets, us, strict=True):
            gate_up_backward(dx_TD, dgate_up_PG, x_TD, u_QR, bucket, names)
        return dx_TD, dweights_TK, None, None, None, None
