"""Which token goes to which expert, sorted once per layer for gate, up, down and the backward."""

from __future__ import annotations

import torch
from torch import Tensor

#: Up to so many pairs a device finds the place of each by comparing it with all others.
MAX_COUNTED = 1024


def counts(experts_TK: Tensor) -> bool:
    return experts_TK.is_cuda and 0 < experts_TK.numel() <= MAX_COUNTED


class Routing:
    """How one batch is spread over the experts. P = tokens * choices pairs, sorted by expert, stable.

    `order` [P]: sorted position -> token * choices + choice, `inverse` [P] back; `experts` and `token` [P] of each
    sorted pair; `ends_E` int32: where the pairs of each expert end. Nothing here waits for a device.
    """

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        self.choices, self.num_experts = experts_TK.shape[1], num_experts
        if counts(experts_TK):
            from workers.model.gpu.experts import sort_pairs  # Triton: only a GPU needs it

            found = sort_pairs(experts_TK.reshape(-1), self.choices, num_experts)
            self.experts, self.order, self.inverse, self.token, self.ends_E = found
            return
        self.experts, self.order = torch.sort(experts_TK.reshape(-1), stable=True)
        self.token = torch.div(self.order, self.choices, rounding_mode="floor")
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        numbers = torch.arange(num_experts, device=self.order.device)
        self.ends_E = torch.searchsorted(self.experts, numbers, right=True).to(torch.int32)
