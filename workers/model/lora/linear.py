"""Linears that carry many adapters at once.

A linear computes y = x W^T for all rows in one product, and adds scale * (x A^T) B^T to each group's rows from the
group's own factors (LoRA, arXiv 2106.09685). Adapters are not autograd leaves: the backward adds each group's gradient
in place to the arena that the caller gave. So the frozen weights never get a gradient, and one arena can gather the
slices of a whole operation.

Invariant (isolation; bit for bit on CPU in float32): a group's results do not depend on the other groups. Products with
an adapter see only the group's rows; products with the base see all rows and rely on base_mm. If the isolation probe
finds that base_mm does not keep rows apart, rows are `apart`, and each group is computed alone.

Shapes: T rows, I in, O out, r rank. u = x A^T is [T, >= parts * r] float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.lora.base_mm import base_mm
from workers.model.lora.products import LoraProducts, on_device, products_of
from workers.model.lora.rows import LoraRows
from workers.model.native import joined
from workers.model.native.gemm import packed


@dataclass(frozen=True)
class Site:
    """The names of one linear's adapter tensors: one A, stacked [len(b) * r, in], and a B [width, r] for each part of
    the fused output. `sizes` are the widths of the parts; columns behind them have no adapter."""

    a: str
    b: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """For each part of the site: the name of the part's B, and the part's width."""
        return tuple(zip(self.b, self.sizes, strict=True))

    @classmethod
    def of(cls, a: str, parts: Mapping[str, int]) -> Site:
        """A site with these parts, by name and width. Their B tensors have the prefix of `a`."""
        at = a.rpartition(".")[0]
        return cls(a, tuple(f"{at}.{name}_B" for name in parts), tuple(parts.values()))


def lora_linear(
    x_TI: Tensor, weight_OI: Tensor, site: Site, rows: LoraRows | None, other: Site | None = None
) -> Tensor:
    """y_TO = x W^T + each group's scale * (x A^T) B^T. Differentiable in x; gradients of adapters are added to
    `rows.grads`. Each adapter has the tensors of `site` or those of `other`. x of any float dtype; y float32, or x's
    dtype on a CPU."""
    if rows is not None and rows.apart:
        own = zip(own_rows(x_TI, rows), rows.singles, strict=True)
        return torch.cat([lora_linear(x, weight_OI, site, single, other) for x, single in own])
    found, trigger = _found([each for each in (site, other) if each is not None], weight_OI, rows)
    if torch.is_grad_enabled() and (trigger is not None or x_TI.requires_grad):
        return cast(Tensor, _LoraLinear.apply(x_TI, trigger, weight_OI, found, None))  # type: ignore[no-untyped-call]
    only, products = found[0] if found else (site, None)
    if (panels := packed(weight_OI)) is not None and len(found) < 2 and joined.takes_parts(products, only.parts):
        return joined.linear(x_TI.contiguous(), panels, products, only.a, only.parts)
    return _product(x_TI, weight_OI, found)[0]


class Then(Protocol):
    """A function of a linear's y [T, O], float32, that is the only reader of y."""

    def forward(self, y_TO: Tensor) -> tuple[Tensor, ...]:
        """The results, computed from y, which may be written to."""

    def backward(self, y_TO: Tensor, *grads: Tensor) -> Tensor:
        """The gradient of y, in the dtype of the weights or in float32."""


def lora_linear_then(
    x_TI: Tensor, weight_OI: Tensor, site: Site, rows: LoraRows | None, then: Then
) -> tuple[Tensor, ...]:
    """The result of `then` for y of `lora_linear`; on a device. `then` runs in the linear's own autograd function, so
    that y is written only once, and its gradient in the dtype that the next product takes."""
    found, trigger = _found([site], weight_OI, rows)
    if torch.is_grad_enabled() and (trigger is not None or x_TI.requires_grad):
        out = _LoraLinear.apply(x_TI, trigger, weight_OI, found, then)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, ...], out)
    return then.forward(_product(x_TI, weight_OI, found)[0])


def _found(
    sites: Sequence[Site], weight_OI: Tensor, rows: LoraRows | None
) -> tuple[list[tuple[Site, LoraProducts]], Tensor | None]:
    """The sites for which the batch has adapters, with their products; and the trigger (`LoraRows.trigger`) if any of
    these adapters is trained."""
    found = [(each, of) for each in sites if (of := products_of(rows, each.a, weight_OI)) is not None]
    groups = [group for each, _ in found for group in rows.groups(each.a)] if rows is not None else []
    return found, rows.trigger(groups) if rows is not None else None


def _product(
    x_TI: Tensor, weight_OI: Tensor, found: Sequence[tuple[Site, LoraProducts]]
) -> tuple[Tensor, list[Tensor]]:
    """y with the parts of all adapters, and u = x A^T of each site."""
    y_TO, x_TI = base_mm(x_TI, weight_OI), x_TI.contiguous()
    return y_TO, [add_adapters(y_TO, x_TI, site, products) for site, products in found]


def own_rows(x_TI: Tensor, rows: LoraRows) -> list[Tensor]:
    """A copy of each group's rows, so that they are aligned in memory as they would be alone."""
    return [part.clone() for part in x_TI.split_with_sizes([b - a for a, b in pairwise(rows.offsets) if b > a])]


def add_adapters(y_TO: Tensor, x_TI: Tensor, site: Site, products: LoraProducts) -> Tensor:
    """Add scale * (x A^T) B^T of each group to its rows of y, in place. Returns u = x A^T, which the backward needs."""
    u = products.room(x_TI, len(site.b))
    products.add(y_TO[:, : sum(site.sizes)], x_TI, u, site.a, site.parts, scaled=True)
    return u


def adapters_backward(
    dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None, u: Tensor, site: Site, products: LoraProducts
) -> None:
    """The backward of `add_adapters`: add to the gradient arenas and, unless None, to dx in place. du = scale * dy B,
    dA += du^T x, dB += scale * dy^T u, dx += du A."""
    parts, du = len(site.b), torch.zeros_like(u)
    parts_of_dy = dy_TO[:, : sum(site.sizes)].split_with_sizes(site.sizes, dim=1)
    for part, (name, dy) in enumerate(zip(site.b, parts_of_dy, strict=True)):
        products.shrink(dy, du, name, part=part, scaled=True)
        products.outer(u, dy, name, part=part, scaled=True)
    products.outer(du, x_TI, site.a, stack=parts, scaled=False)
    if dx_TI is not None:
        products.expand(dx_TI, du, site.a, stack=parts, scaled=False)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        trigger: Tensor | None,
        weight_OI: Tensor,
        found: list[tuple[Site, LoraProducts]],
        then: Then | None,
    ) -> Tensor | tuple[Tensor, ...]:
        x_TI = x_TI.contiguous()
        y_TO, shrunk = _product(x_TI, weight_OI, found)
        out = then.forward(y_TO) if then is not None else y_TO
        ctx.save_for_backward(x_TI if found else None, y_TO if then is not None else None, weight_OI, *shrunk)
        ctx.found, ctx.then, ctx.dtype = found, then, x_TI.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, y_TO, weight_OI, *shrunk = ctx.saved_tensors
        dy_TO = grads[0].contiguous() if ctx.then is None else ctx.then.backward(y_TO, *grads)
        if on_device(weight_OI):
            dy_TO = dy_TO.to(weight_OI.dtype)  # rounded once, for the products of base and adapters
        dx_TI = None
        if ctx.needs_input_grad[0]:
            # A 16-bit input gets a 16-bit gradient: float32 between two products would double what is written and read.
            short = ctx.dtype == weight_OI.dtype != torch.float32
            out = dy_TO.new_empty(len(dy_TO), weight_OI.shape[1], dtype=ctx.dtype) if short else None
            dx_TI = base_mm(dy_TO, weight_OI, transposed=True, out=out)
        for (site, products), u in zip(ctx.found, shrunk, strict=True):
            adapters_backward(dy_TO, x_TI, dx_TI, u, site, products)
        return dx_TI.to(ctx.dtype) if dx_TI is not None else None, None, None, None, None
