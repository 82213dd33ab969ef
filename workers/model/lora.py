"""Linears that carry many adapters at once.

A linear computes y = x W^T for all rows in one product and adds scale * (x A^T) B^T to each group's rows from that
group's own tensors. Adapters are not autograd leaves: the backward adds each group's gradient in place to the arena the
caller gave, so the frozen weights never get a gradient and one arena can gather the slices of a whole operation.

Invariant (bit for bit on CPU in float32): what a group gets does not depend on the other groups. Products with an
adapter see only the group's rows; products with the base see all rows and rely on base_mm. Where the start-up test
finds that it cannot be relied on, rows are `apart` and each group is computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.base_mm import base_mm
from workers.model.lora_gather import add_seated
from workers.model.lora_rows import Group, LoraRows

__all__ = ["Group", "LoraRows", "Site", "adapter_backward", "add_adapter", "base_mm", "lora_linear"]


@dataclass(frozen=True)
class Site:
    """Where a linear finds its factors in an adapter: one A, stacked [len(b) * r, in], and one B per part of the
    fused output. `sizes` are the widths of those parts."""

    a: str
    b: tuple[str, ...]
    sizes: tuple[int, ...]


def lora_linear(x_TI: Tensor, weight_OI: Tensor, site: Site, rows: LoraRows | None) -> Tensor:
    """y_TO = x W^T plus each group's adapter; differentiable in x, gradients of adapters go to `rows.grads`."""
    if rows is not None and rows.apart:
        own = zip(own_rows(x_TI, rows), rows.singles, strict=True)
        return torch.cat([lora_linear(x, weight_OI, site, single) for x, single in own])
    if x_TI.is_cuda:
        from workers.model.gpu.linear import lora_linear as on_device  # Triton: only a GPU needs it

        return on_device(x_TI, weight_OI, site, rows)
    groups = rows.groups(site.a) if rows is not None else []
    trigger = rows.trigger(groups) if rows is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TI.requires_grad):
        return cast(Tensor, _LoraLinear.apply(x_TI, trigger, weight_OI, site, groups))  # type: ignore[no-untyped-call]
    y_TO = base_mm(x_TI, weight_OI)
    groups, seated = rows.forward_groups(site.a) if rows is not None else ([], [])
    add_adapters(y_TO, x_TI, site, groups)
    for some in seated:
        add_seated(y_TO, x_TI, site, some)
    return y_TO


def own_rows(x_TI: Tensor, rows: LoraRows) -> list[Tensor]:
    """A copy of each group's rows, so that they lie in memory as they would alone."""
    return [part.clone() for part in x_TI.split_with_sizes([b - a for a, b in pairwise(rows.offsets) if b > a])]


def views_of(x_TI: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """The rows of each group (ascending, disjoint). One split costs a tenth of slicing group by group."""
    sizes, mine, at = [], [], 0
    for group in groups:
        if group.start > at:
            sizes.append(group.start - at)
        mine.append(len(sizes))
        sizes.append(group.stop - group.start)
        at = group.stop
    pieces = x_TI.split_with_sizes([*sizes, x_TI.shape[0] - at])
    return [pieces[i] for i in mine]


def add_adapter(y_TO: Tensor, x_TI: Tensor, site: Site, group: Group) -> Tensor:
    """Add the group's adapter to its rows of y in place. Returns x A^T, which the backward needs."""
    return add_adapters(y_TO, x_TI, site, [group])[0]


def add_adapters(y_TO: Tensor, x_TI: Tensor, site: Site, groups: Sequence[Group]) -> list[Tensor]:
    """The same for many groups."""
    if not groups:
        return []
    parts = [views_of(part, groups) for part in y_TO.split_with_sizes(site.sizes, dim=1)]
    us = []
    for x, group, *ys in zip(views_of(x_TI, groups), groups, *parts, strict=True):
        adapter = group.adapter
        u = torch.mm(x, adapter.views[site.a].t())
        for name, y, own in zip(site.b, ys, u.split_with_sizes([adapter.rank] * len(site.b), dim=1), strict=True):
            y.addmm_(own, adapter.stored[name], alpha=group.scale)
        us.append(u)
    return us


def adapter_backward(dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None, u: Tensor, site: Site, group: Group) -> None:
    """Undo add_adapter: add to the group's gradient arena and, in place, to its rows of dx."""
    adapters_backward(dy_TO, x_TI, dx_TI, [u], site, [group])


def adapters_backward(
    dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None, us: Sequence[Tensor], site: Site, groups: Sequence[Group]
) -> None:
    """The same for many groups, in their order."""
    if not groups:
        return
    parts = [views_of(part, groups) for part in dy_TO.split_with_sizes(site.sizes, dim=1)]
    dxs = views_of(dx_TI, groups) if dx_TI is not None else [None] * len(groups)
    for x, dx, u, group, *dys in zip(views_of(x_TI, groups), dxs, us, groups, *parts, strict=True):
        adapter, grad, ranks = group.adapter, group.grad, [group.adapter.rank] * len(site.b)
        du = torch.empty_like(u)
        for name, dy, own, down in zip(
            site.b, dys, u.split_with_sizes(ranks, dim=1), du.split_with_sizes(ranks, dim=1), strict=True
        ):
            torch.mm(dy, adapter.views[name], out=down)
            if grad is not None:
                grad.stored[name].addmm_(own.t(), dy, alpha=group.scale)
        du *= group.scale
        if grad is not None:
            grad.stored[site.a].addmm_(du.t(), x)
        if dx is not None:
            dx.addmm_(du, adapter.stored[site.a])


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, trigger: Tensor | None, weight_OI: Tensor, site: Site, groups: list[Group]
    ) -> Tensor:
        y_TO = base_mm(x_TI, weight_OI)
        us = add_adapters(y_TO, x_TI, site, groups)
        ctx.save_for_backward(x_TI if groups else None, weight_OI, *us)
        ctx.site, ctx.groups = site, groups
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *us = ctx.saved_tensors
        dy_TO = dy_TO.contiguous()
        dx_TI = base_mm(dy_TO, weight_OI, transposed=True) if ctx.needs_input_grad[0] else None
        adapters_backward(dy_TO, x_TI, dx_TI, us, ctx.site, ctx.groups)
        return dx_TI, None, None, None, None
