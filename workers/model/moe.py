"""A mixture of frozen experts that carries many adapters at once.

One stable sort by expert of group-major (token, choice) pairs makes both the rows of an expert and, inside them, the
rows of an (expert, group) pair contiguous. The base runs over all rows, expert by expert; the adapters add their
low-rank parts, all groups in one call for each factor. Shared outer factors are applied once per token: the A of gate
and up before the experts, the B of down after the choices are combined; only r-wide rows are permuted.
The backward keeps the gate and up pre-activations, not the expert outputs: the gradient of a router weight is
<d out / d h, h> (SonicMoE, arXiv 2512.14080).

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, D hidden, F expert width, G = 2F (F where experts have no
gate), r rank, S = 2 or 1 factors on gate and up.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.base_mm import per_expert
from workers.model.config import GateConfig
from workers.model.lora import own_rows
from workers.model.lora_products import LoraProducts, products_of
from workers.model.lora_rows import LoraRows
from workers.model.parts.gate import activated, again
from workers.model.routing import Routing


class Names(NamedTuple):
    """Adapter tensors of one MLP, by name; `each_...` where experts do not share the outer factors. Without a gate
    `gate_up_a` is up's alone."""

    gate_up_a: str
    inner_b: tuple[str, ...]
    down_a: str
    down_b: str
    each_gate_up_a: str
    each_down_b: str

    @classmethod
    def at(cls, prefix: str, gate: GateConfig) -> Names:
        stacked, inner = "_".join(gate.parts), tuple(f"{prefix}{part}_B" for part in gate.parts)
        of_down = prefix + "down_A", prefix + "down_B"
        return cls(f"{prefix}{stacked}_A", inner, *of_down, f"{prefix}each_{stacked}_A", prefix + "each_down_B")


class Experts(NamedTuple):
    """The frozen experts of a layer; gate_up_EGD stacks gate over up."""

    gate_up_EGD: Tensor
    down_EDF: Tensor
    gate: GateConfig = GateConfig()
    gate_up_bias_EG: Tensor | None = None
    down_bias_ED: Tensor | None = None


def expert_block(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, names: Names, rows: LoraRows | None
) -> Tensor:
    """sum_k weights[:, k] * down_e(activated(gate_e x, up_e x)), e = experts[:, k] (`parts/gate.py`). Differentiable in
    x and weights; gradients of adapters go to `rows.grads`."""
    if rows is not None and rows.apart:
        own = zip(*(own_rows(t, rows) for t in (x_TD, weights_TK, experts_TK)), rows.singles, strict=True)
        return torch.cat([expert_block(x, w, e, experts, names, single) for x, w, e, single in own])
    gate_up_EGD, down_EDF = experts.gate_up_EGD, experts.down_EDF
    routing = Routing(experts_TK, gate_up_EGD.shape[0])
    plan = _Plan(routing, experts, names, _Adapters.of(rows, routing, names, gate_up_EGD))
    trigger = rows.trigger(rows.groups(names.down_a)) if rows is not None and plan.adapters is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        out = _ExpertBlock.apply(x_TD, weights_TK, trigger, gate_up_EGD, down_EDF, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)
    return _forward(x_TD.contiguous(), weights_TK, gate_up_EGD, down_EDF, plan)[0]


class _Adapters(NamedTuple):
    """The low-rank products of a layer. Per token: `shared`, of adapters that share the outer factors. Per segment
    (of an expert and a group): `paired`, of all adapters, and `each`, of those that do not share. `scale_T1`: scale of
    each token."""

    shared: LoraProducts | None
    paired: LoraProducts
    each: LoraProducts | None
    scale_T1: Tensor

    @classmethod
    def of(cls, rows: LoraRows | None, routing: Routing, names: Names, weight: Tensor) -> _Adapters | None:
        every, shared = products_of(rows, names.down_a, weight), products_of(rows, names.gate_up_a, weight)
        if rows is None or every is None:
            return None
        each = products_of(rows, names.each_gate_up_a, weight)
        scale_T1 = rows.scale_of_row(routing.experts.device)[:, None]
        return cls(shared, every.experts(routing, rows), each.experts(routing, rows) if each else None, scale_T1)


class _Plan(NamedTuple):
    routing: Routing
    experts: Experts
    names: Names
    adapters: _Adapters | None


def _base(x_PI: Tensor, weight_EOI: Tensor, routing: Routing, *, transposed: bool = False) -> Tensor:
    """Each sorted row times the frozen weight of its expert, float32."""
    return per_expert(x_PI, weight_EOI, routing.ends_E, transposed=transposed).to(torch.float32)


def _forward(
    x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The output, and what the backward needs: the pre-activations of gate and up, scale * x A^T per pair [P, Sr],
    h A^T per pair [P, r], and scale * (sum of weighted h A^T) per token [T, r]."""
    routing, adapters, names = plan.routing, plan.adapters, plan.names
    f = down_EDF.shape[2]
    x_PD = x_TD.to(gate_up_EGD.dtype).index_select(0, routing.token)
    gate_up_PG = _base(x_PD, gate_up_EGD, routing)
    if plan.experts.gate_up_bias_EG is not None:
        gate_up_PG = gate_up_PG + plan.experts.gate_up_bias_EG[routing.experts]
    u_P = v_P = combined_T = None
    if adapters is not None:
        u_P = _gate_up_shrink(x_TD, adapters, plan)
        adapters.paired.add(gate_up_PG, None, u_P, "", [(name, f) for name in names.inner_b], scaled=False)
    h_PF = activated(plan.experts.gate, gate_up_PG)
    y_PD = _base(h_PF, down_EDF, routing)
    if plan.experts.down_bias_ED is not None:
        y_PD = y_PD + plan.experts.down_bias_ED[routing.experts]
    if adapters is not None:
        v_P = h_PF.new_zeros(len(h_PF), adapters.paired.max_rank)
        adapters.paired.shrink(h_PF, v_P, names.down_a, scaled=False)
        if adapters.each is not None:
            adapters.each.expand(y_PD, v_P, names.each_down_b, scaled=True)
    out_TD = torch.bmm(weights_TK[:, None, :], _per_token(y_PD, routing)).squeeze(1)
    if adapters is not None and adapters.shared is not None and v_P is not None:
        combined_T = _over_choices(_per_token(v_P, routing) * weights_TK[:, :, None]) * adapters.scale_T1
        adapters.shared.expand(out_TD, combined_T, names.down_b, scaled=False)
    return out_TD, gate_up_PG, u_P, v_P, combined_T


def _gate_up_shrink(x_TD: Tensor, adapters: _Adapters, plan: _Plan) -> Tensor:
    """scale * x A^T of each pair, [P, Sr]."""
    stack = len(plan.names.inner_b)
    u_T = x_TD.new_zeros(len(x_TD), stack * adapters.paired.max_rank)
    if adapters.shared is not None:
        adapters.shared.shrink(x_TD, u_T, plan.names.gate_up_a, stack=stack, scaled=True)
    u_P = u_T.index_select(0, plan.routing.token)
    if adapters.each is not None:
        adapters.each.shrink(x_TD[plan.routing.token], u_P, plan.names.each_gate_up_a, stack=stack, scaled=True)
    return u_P


def _per_token(x_PI: Tensor, routing: Routing) -> Tensor:
    """[P, I] sorted by expert -> [T, K, I]."""
    return x_PI.index_select(0, routing.inverse).view(-1, routing.choices, x_PI.shape[1])


def _over_choices(x_TKI: Tensor) -> Tensor:
    """The sum over K, first to last. On a CPU torch's own sum has an order that depends on I, and so a group's numbers
    would depend on the largest rank in the batch."""
    if x_TKI.is_cuda:
        return x_TKI.sum(1)
    total_TI = x_TKI[:, 0]
    for choice in range(1, x_TKI.shape[1]):
        total_TI = total_TI + x_TKI[:, choice]
    return total_TI


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
        x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG, u_P, v_P, combined_T = ctx.saved_tensors
        plan: _Plan = ctx.plan
        routing = plan.routing
        dout_TD = dout_TD.contiguous()
        inner = again(plan.experts.gate, gate_up_PG)
        h_PF = inner.h
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]

        dout_PD = dout_TD.to(down_EDF.dtype).index_select(0, routing.token)
        dh_PF = _base(dout_PD, down_EDF, routing, transposed=True)  # before the router weight
        if plan.adapters is not None:
            _down_backward(dh_PF, dout_TD, h_PF, weights_P1, (v_P, combined_T), plan, plan.adapters)
        dweights_P = (dh_PF * h_PF).sum(-1)
        if plan.experts.down_bias_ED is not None:
            dweights_P += (dout_TD[routing.token] * plan.experts.down_bias_ED[routing.experts]).sum(-1)
        dweights_TK = dweights_P[routing.inverse].view_as(weights_TK)
        dh_PF *= weights_P1

        dgate_up_PG = torch.empty_like(gate_up_PG)
        inner.backward(dh_PF, dgate_up_PG)
        dx_PD = None
        if ctx.needs_input_grad[0]:
            dx_PD = _base(dgate_up_PG, gate_up_EGD, routing, transposed=True)
        du_P = None
        if plan.adapters is not None:
            du_P = _gate_up_backward(dx_PD, dgate_up_PG, x_TD, u_P, plan, plan.adapters)
        dx_TD = _per_token(dx_PD, routing).sum(1) if dx_PD is not None else None
        if plan.adapters is not None and plan.adapters.shared is not None and du_P is not None:
            _shared_backward(dx_TD, du_P, x_TD, plan, plan.adapters.shared, plan.adapters.scale_T1)
        return dx_TD, dweights_TK, None, None, None, None


def _down_backward(
    dh_PF: Tensor,
    dout_TD: Tensor,
    h_PF: Tensor,
    weights_P1: Tensor,
    shrunk: tuple[Tensor, Tensor | None],
    plan: _Plan,
    adapters: _Adapters,
) -> None:
    """Add to dh in place, before the router weight is applied to it, and to the gradients of the down factors. `shrunk`
    are v and combined of the forward."""
    names, token, (v_P, combined_T) = plan.names, plan.routing.token, shrunk
    dv_T = dout_TD.new_zeros(len(dout_TD), v_P.shape[1])
    if adapters.shared is not None and combined_T is not None:
        adapters.shared.shrink(dout_TD, dv_T, names.down_b, scaled=True)
        adapters.shared.outer(combined_T, dout_TD, names.down_b, scaled=False)
    dv_P = dv_T.index_select(0, token)
    if adapters.each is not None:
        dout_PD = dout_TD[token]
        adapters.each.shrink(dout_PD, dv_P, names.each_down_b, scaled=True)
        adapters.each.outer(v_P * weights_P1, dout_PD, names.each_down_b, scaled=True)
    adapters.paired.expand(dh_PF, dv_P, names.down_a, scaled=False)
    dv_P *= weights_P1
    adapters.paired.outer(dv_P, h_PF, names.down_a, scaled=False)


def _gate_up_backward(
    dx_PD: Tensor | None, dgate_up_PG: Tensor, x_TD: Tensor, u_P: Tensor, plan: _Plan, adapters: _Adapters
) -> Tensor:
    """Add to the gradients of the gate and up factors, and to dx the part through factors that are not shared. Returns
    the gradient of x A^T, before the scale, for the shared ones."""
    names, stack = plan.names, len(plan.names.inner_b)
    du_P = torch.zeros_like(u_P)
    for part, (name, dy_PF) in enumerate(zip(names.inner_b, dgate_up_PG.chunk(stack, dim=1), strict=True)):
        adapters.paired.shrink(dy_PF, du_P, name, part=part, scaled=False)
        adapters.paired.outer(u_P, dy_PF, name, part=part, scaled=False)
    if adapters.each is not None:
        adapters.each.outer(du_P, x_TD[plan.routing.token], names.each_gate_up_a, stack=stack, scaled=True)
        if dx_PD is not None:
            adapters.each.expand(dx_PD, du_P, names.each_gate_up_a, stack=stack, scaled=True)
    return du_P


def _shared_backward(
    dx_TD: Tensor | None, du_P: Tensor, x_TD: Tensor, plan: _Plan, shared: LoraProducts, scale_T1: Tensor
) -> None:
    """Add to dx in place and to the gradients of the shared factors of gate and up."""
    du_T, stack = _over_choices(_per_token(du_P, plan.routing)) * scale_T1, len(plan.names.inner_b)
    shared.outer(du_T, x_TD, plan.names.gate_up_a, stack=stack, scaled=False)
    if dx_TD is not None:
        shared.expand(dx_TD, du_T, plan.names.gate_up_a, stack=stack, scaled=False)
