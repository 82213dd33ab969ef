"""Linears that carry many adapters at once, on a CUDA device: what `workers.model.lora` computes on a CPU.

The base is one product over everybody's rows; the adapters are three kinds of launches over all groups together.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.base_mm import base_mm
from workers.model.gpu.launch import Place, Precision, expand, outer, shrink
from workers.model.gpu.runs import Table, table_of
from workers.model.lora_rows import LoraRows

if TYPE_CHECKING:
    from workers.model.lora import Site


def lora_linear(x_TI: Tensor, weight_OI: Tensor, site: Site, rows: LoraRows | None) -> Tensor:
    """y_TO = x W^T plus each group's adapter; differentiable in x, gradients of adapters go to `rows.grads`."""
    table = table_for(rows, site.a, x_TI.device)
    trigger = rows.trigger(rows.groups(site.a)) if rows is not None and table is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TI.requires_grad):
        return cast(Tensor, _LoraLinear.apply(x_TI, trigger, weight_OI, site, table))  # type: ignore[no-untyped-call]
    y_TO = base_mm(x_TI, weight_OI)
    if table is not None:
        add_adapters(y_TO, x_TI.contiguous(), site, table, Precision.beside(weight_OI.dtype))
    return y_TO


def table_for(rows: LoraRows | None, name: str, device: torch.device) -> Table | None:
    """The batch's table when any adapter has the tensor called `name`."""
    if rows is None or not len(rows):
        return None
    table = table_of(rows, device)
    return table if table.has(name) else None


def add_adapters(y_TO: Tensor, x_TI: Tensor, site: Site, table: Table, precision: Precision) -> Tensor:
    """Add scale * (x A^T) B^T of each group to its rows of y in place. Returns x A^T, which the backward needs."""
    parts = len(site.b)
    u = x_TI.new_zeros(len(x_TI), parts * table.max_rank, dtype=torch.float32)
    place = Place.dense(table, site.a)
    shrink(x_TI, u, place, site.a, precision, stack=parts, scaled=False)
    for part, (name, y) in enumerate(zip(site.b, columns(y_TO, site), strict=True)):
        expand(y, u, place, name, precision, part=part, scaled=True)
    return u


def adapters_backward(
    dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None, u: Tensor, site: Site, table: Table, precision: Precision
) -> None:
    """Undo add_adapters: add to the gradient arenas and, in place, to dx."""
    parts, place, du = len(site.b), Place.dense(table, site.a), torch.zeros_like(u)
    for part, (name, dy) in enumerate(zip(site.b, columns(dy_TO, site), strict=True)):
        shrink(dy, du, place, name, precision, part=part, scaled=True)
        outer(u, dy, place, name, precision, part=part, scaled=True)
    outer(du, x_TI, place, site.a, precision, stack=parts, scaled=False)
    if dx_TI is not None:
        expand(dx_TI, du, place, site.a, precision, stack=parts, scaled=False)


def add_to_head(logits_RV: Tensor, hidden_RD: Tensor, weight_VD: Tensor, site: Site, rows: LoraRows) -> list[Tensor]:
    """add_adapters for the head of logprobs.py; returns nothing where no adapter trains the unembedding."""
    table = table_for(rows, site.a, hidden_RD.device)
    if table is None:
        return []
    return [add_adapters(logits_RV, hidden_RD.contiguous(), site, table, Precision.beside(weight_VD.dtype))]


def head_backward(
    dlogits_RV: Tensor,
    hidden_RD: Tensor,
    dhidden_RD: Tensor,
    us: list[Tensor],
    weight_VD: Tensor,
    site: Site,
    rows: LoraRows,
) -> None:
    """Undo add_to_head."""
    table = table_for(rows, site.a, hidden_RD.device)
    if table is not None:
        precision = Precision.beside(weight_VD.dtype)
        adapters_backward(dlogits_RV, hidden_RD.contiguous(), dhidden_RD, us[0], site, table, precision)


def columns(y_TO: Tensor, site: Site) -> list[Tensor]:
    """The parts of a fused output."""
    ends = list(accumulate(site.sizes))
    return [y_TO[:, end - size : end] for end, size in zip(ends, site.sizes, strict=True)]


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, trigger: Tensor | None, weight_OI: Tensor, site: Site, table: Table | None
    ) -> Tensor:
        y_TO, x_TI = base_mm(x_TI, weight_OI), x_TI.contiguous()
        u = None
        if table is not None:
            u = add_adapters(y_TO, x_TI, site, table, Precision.beside(weight_OI.dtype))
        ctx.save_for_backward(x_TI if table is not None else None, weight_OI, u)
        ctx.site, ctx.table = site, table
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, u = ctx.saved_tensors
        dy_TO = dy_TO.contiguous()
        dx_TI = base_mm(dy_TO, weight_OI, transposed=True) if ctx.needs_input_grad[0] else None
        if ctx.table is not None:
            precision = Precision.beside(weight_OI.dtype)
            adapters_backward(dy_TO, x_TI, dx_TI, u, ctx.site, ctx.table, precision)
        return dx_TI, None, None, None, None
