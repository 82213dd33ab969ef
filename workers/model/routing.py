"""Which token goes to which expert, sorted once per layer for gate, up, down and the backward."""

from __future__ import annotations

import torch
from torch import Tensor


class Routing:
    """How one batch is spread over the experts. P = tokens * choices pairs, sorted by expert, stable.

    `order` [P]: sorted position -> token * choices + choice; `inverse` [P] the other way; `token` [P] of each sorted
    pair; `expert_offsets` cuts the sorted pairs by expert.
    """

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        self.choices, self.num_experts = experts_TK.shape[1], num_experts
        experts = experts_TK.reshape(-1)
        self.order = torch.argsort(experts, stable=True)
        self.experts = experts[self.order]
        self.token = self.order // self.choices
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(len(experts), device=experts.device)
        counts = torch.bincount(experts, minlength=num_experts)
        self.expert_offsets: list[int] = [0, *counts.cumsum(0).tolist()]
