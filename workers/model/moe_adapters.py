"""The low-rank part of an expert block, for the groups of one rank (a Bucket) at a time.

Of the shared-outer factors the A of gate and up is applied once per token and the B of down once per token, after the
choices are combined; only r-wide rows are permuted. Gradients are added in place to the groups' arenas, in group order.

Shapes as in moe_slots.py; D hidden, F expert width, G = 2F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.lora import views_of
from workers.model.moe_slots import Bucket


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


def gate_up_forward(gate_up_PG: Tensor, x_TD: Tensor, bucket: Bucket, names: Names) -> Tensor:
    """Add the gate and up parts in place. Returns scale * x A^T of each slot, [Q, 2r], zero where it is empty."""
    r, f = bucket.rank, gate_up_PG.shape[1] // 2
    u_TR = x_TD.new_empty(bucket.tokens.rows + 1, 2 * r)
    for x, u, group in zip(views_of(x_TD, bucket.groups), bucket.tokens.of(u_TR), bucket.groups, strict=True):
        torch.mm(x, group.adapter.views[names.gate_up_a].t(), out=u)
    u_QR = _to_slots(u_TR, bucket)
    parts = []
    for part, name in enumerate((names.gate_b, names.up_b)):
        us = bucket.slots.of(u_QR[:, part * r : part * r + r])
        out_QF = x_TD.new_empty(len(u_QR), f)
        for u, out, experts, group in zip(us, bucket.slots.of(out_QF), bucket.experts, bucket.groups, strict=True):
            experts.times(u, group.adapter.stored[name], out)
        parts.append(out_QF.index_select(0, bucket.slot_S))
    gate_up_PG.index_add_(0, bucket.pair_S, torch.cat(parts, dim=1))
    return u_QR


def down_forward(out_TD: Tensor, h_PF: Tensor, weights_TK: Tensor, bucket: Bucket, names: Names) -> Tensor:
    """Add the down part in place. Returns scale * h A^T of the choices, weighted and added up, [T, r]."""
    h_QF = h_PF.index_select(0, bucket.pair_Q)
    v_QR = h_PF.new_empty(len(h_QF), bucket.rank)
    slots = zip(bucket.slots.of(h_QF), bucket.slots.of(v_QR), bucket.experts, bucket.groups, strict=True)
    for h, v, experts, group in slots:
        experts.times(h, group.adapter.views[names.down_a].transpose(1, 2), v)
    weights_TK = weights_TK.index_select(0, bucket.row_T)
    combined_TR = _combine(v_QR, bucket, weights_TK)
    tokens = zip(views_of(out_TD, bucket.groups), bucket.tokens.of(combined_TR), bucket.groups, strict=True)
    for out, combined, group in tokens:
        out.addmm_(combined, group.adapter.stored[names.down_b])
    return combined_TR


def down_backward(
    dh_PF: Tensor,
    dout_TD: Tensor,
    h_PF: Tensor,
    weights_P1: Tensor,
    combined_TR: Tensor,
    bucket: Bucket,
    names: Names,
) -> None:
    """Add to dh in place, before the router weight is applied to it, and to the gradients of the down factors."""
    dv_TR = dout_TD.new_empty(bucket.tokens.rows + 1, bucket.rank)
    combined = bucket.tokens.of(combined_TR)
    douts = views_of(dout_TD, bucket.groups)
    for dout, own, dv, group in zip(douts, combined, bucket.tokens.of(dv_TR), bucket.groups, strict=True):
        torch.mm(dout, group.adapter.views[names.down_b], out=dv)
        if group.grad is not None:
            group.grad.stored[names.down_b].addmm_(own.t(), dout)
    dv_QR = _to_slots(dv_TR, bucket)
    dh_QF = dh_PF.new_empty(len(dv_QR), dh_PF.shape[1])
    slots = zip(bucket.slots.of(dv_QR), bucket.slots.of(dh_QF), bucket.experts, bucket.groups, strict=True)
    for dv, dh, experts, group in slots:
        experts.times(dv, group.adapter.stored[names.down_a], dh)
    dh_PF.index_add_(0, bucket.pair_S, dh_QF.index_select(0, bucket.slot_S))
    dv_QR *= weights_P1.index_select(0, bucket.pair_Q)
    h_QF = torch.index_select(h_PF, 0, bucket.pair_Q, out=dh_QF)
    slots = zip(bucket.slots.of(dv_QR), bucket.slots.of(h_QF), bucket.experts, bucket.groups, strict=True)
    for dv, h, experts, group in slots:
        if group.grad is not None:
            experts.add_outer(dv, h, group.grad.stored[names.down_a])


def gate_up_backward(
    dx_TD: Tensor | None, dgate_up_PG: Tensor, x_TD: Tensor, u_QR: Tensor, bucket: Bucket, names: Names
) -> None:
    """Add to dx in place and to the gradients of the gate and up factors."""
    r, f = bucket.rank, dgate_up_PG.shape[1] // 2
    dgate_up_QG, combined = dgate_up_PG.index_select(0, bucket.pair_Q), []
    for part, name in enumerate((names.gate_b, names.up_b)):
        dys = bucket.slots.of(dgate_up_QG[:, part * f : part * f + f])
        us, du_QR = bucket.slots.of(u_QR[:, part * r : part * r + r]), u_QR.new_empty(len(u_QR), r)
        dus = bucket.slots.of(du_QR)
        for dy, u, du, experts, group in zip(dys, us, dus, bucket.experts, bucket.groups, strict=True):
            experts.times(dy, group.adapter.views[name], du)
            if group.grad is not None:
                experts.add_outer(u, dy, group.grad.stored[name])
        combined.append(_combine(du_QR, bucket))
    xs, dus = views_of(x_TD, bucket.groups), bucket.tokens.of(torch.cat(combined, dim=1))
    dxs = views_of(dx_TD, bucket.groups) if dx_TD is not None else [None] * len(bucket.groups)
    for x, dx, du, group in zip(xs, dxs, dus, bucket.groups, strict=True):
        if group.grad is not None:
            group.grad.stored[names.gate_up_a].addmm_(du.t(), x)
        if dx is not None:
            dx.addmm_(du, group.adapter.stored[names.gate_up_a])


def _to_slots(u_TR: Tensor, bucket: Bucket) -> Tensor:
    """Scale the tokens' rows and copy them into slots. The last of the T + 1 rows is what empty slots get: zero."""
    u_TR[:-1] *= bucket.scale_T1
    u_TR[-1] = 0.0
    return u_TR.index_select(0, bucket.token_Q)


def _combine(own_QR: Tensor, bucket: Bucket, weights_TK: Tensor | None = None) -> Tensor:
    """Add up the choices of each token, weighted if asked, times the scale: [Q, r] -> [T, r]."""
    own_TKR = own_QR.index_select(0, bucket.slot_X).view(bucket.tokens.rows, -1, own_QR.shape[1])
    if weights_TK is not None:
        own_TKR *= weights_TK[:, :, None]
    return own_TKR.sum(1).mul_(bucket.scale_T1)
