"""A mixture layer's `Away` (mixture/experts.py): its experts are owned by the processes of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Inner
from workers.model.owned.exchange import Exchange
from workers.model.routing import Routing


class OfLayer(NamedTuple):
    """`Away` of one layer; `stack` is the number of factors on gate and up."""

    exchange: Exchange
    layer: int
    num_experts: int
    stack: int

    def inner(self, routing: Routing, rows: LoraRows | None) -> Inner:
        return _There(self, routing, rows)


class _There(NamedTuple):
    """`Inner` (mixture/experts.py) on the experts' owners. Pairs are in the order of `routing` here, and travel by
    owner and group."""

    of: OfLayer
    routing: Routing
    rows: LoraRows | None

    def forward(self, x_TD: Tensor, u_P: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        exchange, routing = self.of.exchange, self.routing
        groups = len(self.rows.adapters) if self.rows is not None else 1
        owner_P = torch.div(routing.experts, exchange.each, rounding_mode="floor")
        key_P = owner_P * groups
        if self.rows is not None:
            key_P = key_P + self.rows.group_of_row(key_P.device)[routing.token]
        away = torch.sort(key_P, stable=True).indices
        back = torch.empty_like(away)
        back[away] = torch.arange(len(away), device=away.device)
        counts = torch.bincount(key_P, minlength=exchange.ranks * groups).view(exchange.ranks, groups).tolist()
        expert_P1 = (routing.experts - owner_P * exchange.each)[away][:, None]
        u = x_TD.new_zeros(len(away), self.of.stack * exchange.step.max_rank, dtype=torch.float32)
        if u_P is not None:
            columns = min(u_P.shape[1], u.shape[1])  # a group uses the first ones
            u[:, :columns] = u_P[:, :columns].index_select(0, away)
        x_PD = x_TD.index_select(0, routing.token[away])
        y_PD, v_P = exchange.forward(self.of.layer, x_PD, u, expert_P1, counts)
        return y_PD.index_select(0, back), v_P.index_select(0, back), (away, back)

    def backward(
        self, dout_TD: Tensor, dv_P: Tensor | None, weights_P1: Tensor, kept: tuple[Tensor | None, ...], with_x: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        exchange, (away, back) = self.of.exchange, kept
        assert away is not None
        assert back is not None
        dv = weights_P1.new_zeros(len(away), exchange.step.max_rank)
        if dv_P is not None:
            dv.copy_(dv_P.index_select(0, away))
        dout_PD = dout_TD.index_select(0, self.routing.token[away])
        found = exchange.backward(self.of.layer, dout_PD, dv, weights_P1.index_select(0, away))
        dx_PD, du_P, dweights_P = (each.index_select(0, back) for each in found)
        return dx_PD, du_P, dweights_P
