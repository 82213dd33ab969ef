"""Which rows of a packed batch belong to which adapter.

Rows are ordered by group: group g has rows offsets[g]:offsets[g+1] and one adapter. The group is the unit of isolation:
whatever is computed with an adapter sees the rows of one group only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.device import sent


@dataclass(frozen=True)
class Group:
    """Rows start:stop belong to one adapter. `grad` receives the adapter's gradient; None if it is not trained here."""

    index: int
    start: int
    stop: int
    adapter: Adapter
    grad: Adapter | None

    @property
    def scale(self) -> float:
        return self.adapter.scale


class LoraRows:
    """Which rows of a packed batch belong to which adapter.

    `adapters[g]` None: the base model alone. `grads[g]`, an arena of the adapter's shape, receives the gradient by
    addition. Groups may share one adapter and one arena; they add in the order of groups. `apart`: every product of a
    group, with the base too, must be computed alone (isolation.py)."""

    def __init__(
        self,
        offsets: Sequence[int],
        adapters: Sequence[Adapter | None],
        grads: Sequence[Adapter | None] | None = None,
        *,
        apart: bool = False,
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
        self.apart = apart
        self._group_of_row: Tensor | None = None
        self._scale_of_row: Tensor | None = None
        self._by_tensor: dict[str, list[Group]] = {}
        self._groups = [
            Group(g, offsets[g], offsets[g + 1], adapter, grads[g])
            for g, adapter in enumerate(adapters)
            if adapter is not None and offsets[g + 1] > offsets[g]
        ]

    def __len__(self) -> int:
        """The number of rows."""
        return self.offsets[-1]

    def groups(self, tensor: str) -> list[Group]:
        """The groups whose adapter has a tensor of this name."""
        found = self._by_tensor.get(tensor)
        if found is None:
            found = self._by_tensor[tensor] = [group for group in self._groups if tensor in group.adapter.views]
        return found

    def trigger(self, groups: Sequence[Group]) -> Tensor | None:
        """A leaf tensor that makes autograd record a product. Without it nothing would be recorded below the first
        trained linear, where neither weights nor input need a gradient. None if none of `groups` is trained."""
        if torch.is_grad_enabled() and any(group.grad is not None for group in groups):
            return self._leaf
        return None

    @cached_property
    def _leaf(self) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def group_of_row(self, device: torch.device) -> Tensor:
        """int64 [rows]: the group of each row."""
        if self._group_of_row is None or self._group_of_row.device != device:
            # numpy's repeat: torch's takes milliseconds even for few rows, because it wakes every thread.
            groups = np.repeat(np.arange(len(self.adapters)), np.diff(self.offsets))
            self._group_of_row = sent(torch.from_numpy(groups), device)
        return self._group_of_row

    def scale_of_row(self, device: torch.device) -> Tensor:
        """float32 [rows]: the scale of each row's adapter, 0 without one."""
        if self._scale_of_row is None or self._scale_of_row.device != device:
            scales = torch.tensor([0.0 if adapter is None else adapter.scale for adapter in self.adapters])
            self._scale_of_row = sent(scales, device)[self.group_of_row(device)]
        return self._scale_of_row

    def select(self, rows: Tensor) -> LoraRows:
        """The same groups over a subset of the rows, given by ascending row numbers (repeats allowed)."""
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= len(self) or bool((rows[1:] < rows[:-1]).any())):
            raise ValueError(f"rows must ascend within 0..{len(self) - 1}")
        bounds = torch.tensor(self.offsets, device=rows.device)
        offsets = torch.searchsorted(rows.contiguous(), bounds).tolist()
        return LoraRows(offsets, self.adapters, self.grads, apart=self.apart)

    def kept_apart(self) -> LoraRows:
        """The same rows with `apart`."""
        return self if self.apart else LoraRows(self.offsets, self.adapters, self.grads, apart=True)

    @cached_property
    def singles(self) -> list[LoraRows]:
        """One LoraRows for each group that has rows."""
        return [
            LoraRows([0, b - a], [self.adapters[g]], [self.grads[g]])
            for g, (a, b) in enumerate(pairwise(self.offsets))
            if b > a
        ]

    def slices(self, max_rows: int) -> Iterator[tuple[int, int, LoraRows]]:
        """Cut the rows into slices of about `max_rows`. A group is cut only at multiples of `max_rows` from its own
        start, so that its sums do not depend on its neighbours; short neighbours share a slice unless kept apart."""
        pieces = [
            (start, min(start + max_rows, b), g)
            for g, (a, b) in enumerate(pairwise(self.offsets))
            for start in range(a, b, max_rows)
        ]
        at = 0
        while at < len(pieces):
            end = at + 1
            while not self.apart and end < len(pieces) and pieces[end][1] - pieces[at][0] <= max_rows:
                end += 1
            taken, first = pieces[at:end], pieces[at][0]
            offsets = [0, *(stop - first for _, stop, _ in taken)]
            of = [g for _, _, g in taken]
            yield first, taken[-1][1], LoraRows(offsets, [self.adapters[g] for g in of], [self.grads[g] for g in of])
            at = end
