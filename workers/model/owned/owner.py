"""What an owner computes for all processes: the insides of its experts, with the adapters of the pairs' groups.

Shapes: Q pairs received, by process and group; the rows of a group are in the order of their process's routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.lora.products import LoraProducts, products_of
from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Experts, Names, Sorted
from workers.model.routing import Routing

#: A number for each process and each of its groups.
PerGroup = list[list[int]]
AdapterPerGroup = list[list[Adapter | None]]


@dataclass(frozen=True)
class Served:
    """The pairs that an owner computed in one layer: `counts` per group, the groups' adapters, and what the backward
    needs."""

    counts: PerGroup
    adapters: AdapterPerGroup
    inner: Sorted
    kept: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Owner:
    """One layer's experts on this process."""

    experts: Experts
    names: Names

    def forward(
        self, counts: PerGroup, adapters: AdapterPerGroup, x_QD: Tensor, u_Q: Tensor, expert_Q1: Tensor, width: int
    ) -> tuple[Served, list[Tensor]]:
        """Returns what the backward needs, and y_QD in the weights' dtype with v = h A^T, float32 [Q, width]."""
        routing = Routing(expert_Q1, len(self.experts.down_EDF))
        inner = Sorted(routing, self.experts, self.names, self._paired(routing, counts, adapters, None))
        u = u_Q.index_select(0, routing.order) if inner.paired is not None else None
        y_QD, v, kept = inner.forward(x_QD, u)
        v_Q = u_Q.new_zeros(len(u_Q), width)
        if v is not None:
            columns = min(v.shape[1], width)  # a group uses the first ones
            v_Q[:, :columns] = v[:, :columns].index_select(0, routing.inverse)
        return Served(counts, adapters, inner, kept), [y_QD.index_select(0, routing.inverse), v_Q]

    def backward(
        self, served: Served, gradients: AdapterPerGroup, dout_QD: Tensor, dv_Q: Tensor, weights_Q1: Tensor
    ) -> list[Tensor]:
        """dx_QD, and du with dweights as its last column. Adds to the `gradients` of trained groups."""
        routing = served.inner.routing
        inner = served.inner._replace(paired=self._paired(routing, served.counts, served.adapters, gradients))
        dv, weights = (each.index_select(0, routing.order) for each in (dv_Q, weights_Q1))
        dx_QD, du, dweights = inner.backward(dout_QD, dv, weights, served.kept, with_x=True)
        assert dx_QD is not None
        du = du if du is not None else dv.new_zeros(len(dv), len(self.names.inner_b) * dv.shape[1])
        return [each.index_select(0, routing.inverse) for each in (dx_QD, torch.cat((du, dweights[:, None]), dim=1))]

    def _paired(
        self, routing: Routing, counts: PerGroup, adapters: AdapterPerGroup, gradients: AdapterPerGroup | None
    ) -> LoraProducts | None:
        grads = list(chain(*gradients)) if gradients is not None else None
        rows = LoraRows([0, *accumulate(chain(*counts))], list(chain(*adapters)), grads)
        products = products_of(rows, self.names.down_a, self.experts.gate_up_EGD)
        return products.experts(routing, rows) if products is not None else None
