"""The decode path: adapters of many groups of a row or two, by gathering their factors from the pool's blocks.

Each row is multiplied by its own copy of its factors, so its result does not depend on the rows beside it. Forward
only. Shapes: R rows of one block, P = R * choices pairs, r rank.
"""

# NOTE FOR HELPER G (from the coordinator; remove this note when acted on): in-place grouped C kernels (expand, shrink, outer over
# lists of (row range, weight pointer); plain C compiled with cc, called through ctypes) are being added by the coordinator in
# workers/model/native/ (from 10:45 on) together with the training path that uses them (lora.py, moe.py). Do not write a
# second native extension: use these for decode (they read each adapter in place, so pool, seats and gathers may go).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workers.model.adapter_pool import Block
    from workers.model.lora import Site
    from workers.model.moe import Names
    from workers.model.routing import Routing


@dataclass(frozen=True)
class SeatedRows:
    """Rows of the batch whose adapters sit in one block: row, seat and scale of each."""

    block: Block
    rows_R: Tensor
    seats_R: Tensor
    scale_R1: Tensor

    @classmethod
    def of(cls, block: Block, entries: Sequence[tuple[int, int, float]]) -> SeatedRows:
        rows, seats, scales = zip(*entries, strict=True)
        device = block.flat.device
        scale_R1 = torch.tensor(scales, device=device)[:, None]
        return cls(block, torch.tensor(rows, device=device), torch.tensor(seats, device=device), scale_R1)

    def factor(self, name: str) -> Tensor:
        """The tensor called `name` of each row's adapter."""
        return self.block.gather(name, self.seats_R)


def _times(factor_ROI: Tensor, x_RI: Tensor) -> Tensor:
    # With the vector on the left: MKL is several times slower with it on the right.
    return torch.bmm(x_RI[:, None, :], factor_ROI.transpose(1, 2)).squeeze(1)


def add_seated(y_TO: Tensor, x_TI: Tensor, site: Site, seated: SeatedRows) -> None:
    """Add scale * (x A^T) B^T to the seated rows of y in place."""
    r = seated.block.shape.rank
    u = _times(seated.factor(site.a), x_TI[seated.rows_R]) * seated.scale_R1
    parts = [_times(seated.factor(name), u[:, i * r : (i + 1) * r]) for i, name in enumerate(site.b)]
    y_TO.index_add_(0, seated.rows_R, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))


class SeatedExperts:
    """The same for one expert block: `gate_up` before the activation, `down` after."""

    def __init__(self, seated: SeatedRows, names: Names, routing: Routing, weights_TK: Tensor) -> None:
        self._seated, self._names, choices = seated, names, routing.choices
        self._weights_RK1 = weights_TK[seated.rows_R][:, :, None]
        self._positions_P = routing.inverse.view(-1, choices)[seated.rows_R].reshape(-1)
        self._experts_P = routing.experts[self._positions_P]
        self._seats_P = seated.seats_R.repeat_interleave(choices)
        self._choices = choices

    def _factor(self, name: str) -> Tensor:
        """The tensor called `name` of each pair's adapter and expert."""
        return self._seated.block.gather(name, self._seats_P, self._experts_P)

    def gate_up(self, gate_up_PG: Tensor, x_TD: Tensor) -> None:
        seated, names, r = self._seated, self._names, self._seated.block.shape.rank
        u = _times(seated.factor(names.gate_up_a), x_TD[seated.rows_R]) * seated.scale_R1
        u_P = u.repeat_interleave(self._choices, dim=0)
        gate, up = _times(self._factor(names.gate_b), u_P[:, :r]), _times(self._factor(names.up_b), u_P[:, r:])
        gate_up_PG.index_add_(0, self._positions_P, torch.cat((gate, up), dim=1))

    def down(self, out_TD: Tensor, h_PF: Tensor) -> None:
        seated, names = self._seated, self._names
        v_P = _times(self._factor(names.down_a), h_PF[self._positions_P])
        combined = (v_P.view(-1, self._choices, v_P.shape[1]) * self._weights_RK1).sum(1) * seated.scale_R1
        out_TD.index_add_(0, seated.rows_R, _times(seated.factor(names.down_b), combined))
