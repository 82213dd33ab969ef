"""Linears that carry many adapters at once.

Rows of a packed batch are group-major: group g owns rows offsets[g]:offsets[g+1] and one adapter. A linear computes
y = x W^T for all rows in one product and adds scale * (x A^T) B^T to each group's rows from that group's own tensors.
Adapters are not autograd leaves: the backward adds each group's gradient in place to the arena the caller gave, so the
frozen weights never get a gradient and one arena can gather the slices of a whole operation.

Invariant (bit for bit on CPU in float32): what a group gets does not depend on the other groups. Products with an
adapter see only the group's rows; products with the base see all rows, and a BLAS result of one row does not depend on
the number of rows except below MIN_ROWS, where libraries switch kernels, so small products are padded up to it.
Measured with MKL on 1 and 2 threads for widths that are multiples of 8, as every published model's are; with an odd
expert width, vectorised elementwise kernels round the ends of rows differently depending on where a row lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.adapter import Adapter
from workers.model.lora_gather import SeatedRows, add_seated

if TYPE_CHECKING:
    from workers.model.adapter_pool import Block

#: Below this many rows matrix libraries use other kernels, with other rounding. Measured on MKL; see base_mm.
MIN_ROWS = 16

#: Groups of at most so many rows are gathered from their pool in a forward that records nothing.
GATHER_ROWS = 2


@dataclass(frozen=True)
class Group:
    """Rows start:stop belong to one adapter; `grad` takes its gradient, None when it is not trained here."""

    index: int
    start: int
    stop: int
    adapter: Adapter
    grad: Adapter | None

    @property
    def scale(self) -> float:
        return self.adapter.scale


class LoraRows:
    """Which rows of a packed batch run through which adapter.

    `adapters[g]` None is the base model alone. `grads[g]`, of the adapter's shape, receives the gradient by addition.
    Groups may share one adapter and one arena; they add in group order.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        adapters: Sequence[Adapter | None],
        grads: Sequence[Adapter | None] | None = None,
    ) -> None:
        grads = [None] * len(adapters) if grads is None else grads
        if len(offsets) != len(adapters) + 1 or len(grads) != len(adapters):
            raise ValueError(f"{len(offsets)} offsets, {len(adapters)} adapters and {len(grads)} grads do not agree")
        if offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
            raise ValueError(f"offsets must start at 0 and not decrease: {list(offsets)}")
        for g, (adapter, grad) in enumerate(zip(adapters, grads, strict=True)):
            if grad is not None and (adapter is None or grad.flat.shape != adapter.flat.shape):
                raise ValueError(f"group {g}: the gradient arena does not have the shape of the adapter")
        self.offsets, self.adapters, self.grads = list(offsets), list(adapters), list(grads)
        self._group_of_row: Tensor | None = None
        self._groups = [
            Group(g, offsets[g], offsets[g + 1], adapter, grads[g])
            for g, adapter in enumerate(adapters)
            if adapter is not None and offsets[g + 1] > offsets[g]
        ]

    def __len__(self) -> int:
        """Number of rows."""
        return self.offsets[-1]

    def groups(self, tensor: str) -> list[Group]:
        """The groups whose adapter has a tensor of this name."""
        return [group for group in self._groups if tensor in group.adapter.views]

    def forward_groups(self, tensor: str) -> tuple[list[Group], list[SeatedRows]]:
        """The same for a forward that records nothing: small groups with seated adapters come as rows of their block,
        the others one by one. Which way a group goes depends on itself alone."""
        groups, seated = self._by_size
        return (
            [group for group in groups if tensor in group.adapter.views],
            [rows for rows in seated if tensor in rows.block.shape.slots],
        )

    @cached_property
    def _by_size(self) -> tuple[list[Group], list[SeatedRows]]:
        large: list[Group] = []
        blocks: dict[int, tuple[Block, list[tuple[int, int, float]]]] = {}
        for group in self._groups:
            seat = group.adapter.seat
            if seat is None or group.stop - group.start > GATHER_ROWS:
                large.append(group)
                continue
            _, entries = blocks.setdefault(id(seat.block), (seat.block, []))
            entries += [(row, seat.index, group.scale) for row in range(group.start, group.stop)]
        return large, [SeatedRows.of(block, entries) for block, entries in blocks.values()]

    def trigger(self, groups: Sequence[Group]) -> Tensor | None:
        """A leaf that makes autograd record a product although neither its weights nor, below the first trained
        linear, its input wants a gradient. None when no group is trained, so that nothing is recorded."""
        if torch.is_grad_enabled() and any(group.grad is not None for group in groups):
            return self._leaf
        return None

    @cached_property
    def _leaf(self) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def group_of_row(self, device: torch.device) -> Tensor:
        """int64 [rows]: the group of each row."""
        if self._group_of_row is None or self._group_of_row.device != device:
            sizes = torch.tensor([b - a for a, b in pairwise(self.offsets)])
            self._group_of_row = torch.repeat_interleave(torch.arange(len(self.adapters)), sizes).to(device)
        return self._group_of_row

    def select(self, rows: Tensor) -> LoraRows:
        """The same groups over a subset of the rows, named in ascending order (repeats allowed)."""
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= len(self) or bool((rows[1:] < rows[:-1]).any())):
            raise ValueError(f"rows must ascend within 0..{len(self) - 1}")
        bounds = torch.tensor(self.offsets, device=rows.device)
        offsets = torch.searchsorted(rows.contiguous(), bounds).tolist()
        return LoraRows(offsets, self.adapters, self.grads)

    def slices(self, max_rows: int) -> Iterator[tuple[int, int, LoraRows]]:
        """Cut the rows into runs of about `max_rows`. A group is cut only at multiples of `max_rows` from its own
        start, so that its sums do not depend on its neighbours; short neighbours share a run."""
        pieces = [
            (start, min(start + max_rows, b), g)
            for g, (a, b) in enumerate(pairwise(self.offsets))
            for start in range(a, b, max_rows)
        ]
        at = 0
        while at < len(pieces):
            end = at + 1
            while end < len(pieces) and pieces[end][1] - pieces[at][0] <= max_rows:
                end += 1
            run, first = pieces[at:end], pieces[at][0]
            offsets = [0, *(stop - first for _, stop, _ in run)]
            of = [g for _, _, g in run]
            yield first, run[-1][1], LoraRows(offsets, [self.adapters[g] for g in of], [self.grads[g] for g in of])
            at = end


def base_mm(x_TI: Tensor, weight_OI: Tensor, *, transposed: bool = False) -> Tensor:
    """x W^T, or x W when `transposed`, in the weight's dtype and returned in x's, padded to MIN_ROWS rows.

    On MKL with one thread float32 rows come out equal whatever else is in the batch once there are that many; below,
    it takes a matrix-vector path. Measured, not promised by any library: the isolation tests guard it."""
    weight = weight_OI if transposed else weight_OI.t()
    x, rows = x_TI.to(weight.dtype), x_TI.shape[0]
    if 0 < rows < MIN_ROWS:
        padded = x.new_zeros(MIN_ROWS, x.shape[1])
        padded[:rows] = x
        return torch.mm(padded, weight)[:rows].to(x_TI.dtype)
    return torch.mm(x, weight).to(x_TI.dtype)


@dataclass(frozen=True)
class Site:
    """Where a linear finds its factors in an adapter: one A, stacked [len(b) * r, in], and one B per part of the
    fused output. `sizes` are the widths of those parts."""

    a: str
    b: tuple[str, ...]
    sizes: tuple[int, ...]


def lora_linear(x_TI: Tensor, weight_OI: Tensor, site: Site, rows: LoraRows | None) -> Tensor:
    """y_TO = x W^T plus each group's adapter; differentiable in x, gradients of adapters go to `rows.grads`."""
    groups = rows.groups(site.a) if rows is not None else []
    trigger = rows.trigger(groups) if rows is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TI.requires_grad):
        return cast(Tensor, _LoraLinear.apply(x_TI, trigger, weight_OI, site, groups))  # type: ignore[no-untyped-call]
    y_TO = base_mm(x_TI, weight_OI)
    groups, seated = rows.forward_groups(site.a) if rows is not None else ([], [])
    for group in groups:
        add_adapter(y_TO, x_TI, site, group)
    for some in seated:
        add_seated(y_TO, x_TI, site, some)
    return y_TO


def add_adapter(y_TO: Tensor, x_TI: Tensor, site: Site, group: Group) -> Tensor:
    """Add the group's adapter to its rows of y in place. Returns x A^T, which the backward needs."""
    a, b, r = group.start, group.stop, group.adapter.rank
    u = torch.mm(x_TI[a:b], group.adapter.view(site.a).t())
    column = 0
    for part, (name, size) in enumerate(zip(site.b, site.sizes, strict=True)):
        factor = group.adapter.view(name)
        y_TO[a:b, column : column + size].addmm_(u[:, part * r : (part + 1) * r], factor.t(), alpha=group.scale)
        column += size
    return u


def adapter_backward(dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None, u: Tensor, site: Site, group: Group) -> None:
    """Undo add_adapter: add to the group's gradient arena and, in place, to its rows of dx."""
    a, b, r = group.start, group.stop, group.adapter.rank
    du = dy_TO.new_empty(b - a, len(site.b) * r)
    column = 0
    for part, (name, size) in enumerate(zip(site.b, site.sizes, strict=True)):
        dy, of = dy_TO[a:b, column : column + size], slice(part * r, (part + 1) * r)
        du[:, of] = torch.mm(dy, group.adapter.view(name))
        if group.grad is not None:
            group.grad.view(name).addmm_(dy.t(), u[:, of], alpha=group.scale)
        column += size
    du *= group.scale
    if group.grad is not None:
        group.grad.view(site.a).addmm_(du.t(), x_TI[a:b])
    if dx_TI is not None:
        dx_TI[a:b].addmm_(du, group.adapter.view(site.a))


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, trigger: Tensor | None, weight_OI: Tensor, site: Site, groups: list[Group]
    ) -> Tensor:
        y_TO = base_mm(x_TI, weight_OI)
        us = [add_adapter(y_TO, x_TI, site, group) for group in groups]
        ctx.save_for_backward(x_TI if groups else None, weight_OI, *us)
        ctx.site, ctx.groups = site, groups
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *us = ctx.saved_tensors
        dy_TO = dy_TO.contiguous()
        dx_TI = base_mm(dy_TO, weight_OI, transposed=True) if ctx.needs_input_grad[0] else None
        for group, u in zip(ctx.groups, us, strict=True):
            adapter_backward(dy_TO, x_TI, dx_TI, u, ctx.site, group)
        return dx_TI, None, None, None, None
