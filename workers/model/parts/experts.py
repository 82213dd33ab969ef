"""A mixture of experts: a router, the experts it chooses from, and those that every token has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workers.model.config import DecoderConfig
from workers.model.lora import LoraRows
from workers.model.moe import Experts, Names, expert_block
from workers.model.parts.frozen import frozen
from workers.model.parts.mlp import Mlp
from workers.model.parts.router import Router
from workers.model.parts.steady import sigmoid_of

#: Called for every mixture layer with its index and the chosen experts [tokens, choices].
OnRoute = Callable[[int, Tensor], None]


class Mixture(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        e, f, d = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.layer, self.names, self._gate = layer, Names.of_layer(layer), config.gate
        self.router = Router(config, dtype)
        self.gate_up = frozen(dtype, e, 2 * f, d)
        self.down = frozen(dtype, e, d, f)
        self.gate_up_bias = frozen(torch.float32, e, 2 * f) if config.expert_bias else None
        self.down_bias = frozen(torch.float32, e, d) if config.expert_bias else None
        width = config.shared_intermediate_size
        self.shared = Mlp(config, f"layers.{layer}.mlp.{config.shared_name}.", width, dtype) if width else None
        self.shared_gate = frozen(torch.float32, d) if config.shared_gate else None

    def forward(
        self, x_TD: Tensor, lora: LoraRows | None, on_route: OnRoute | None, forced_TK: Tensor | None
    ) -> Tensor:
        weights_TK, experts_TK = self.router(x_TD, lora, forced_TK)
        if on_route is not None:
            on_route(self.layer, experts_TK)
        experts = Experts(self.gate_up, self.down, self._gate, self.gate_up_bias, self.down_bias)
        out_TD = expert_block(x_TD, weights_TK, experts_TK, experts, self.names, lora)
        if self.shared is None:
            return out_TD
        shared_TD: Tensor = self.shared(x_TD, lora)
        if self.shared_gate is not None:  # summed row by row: a product with one row of weights rounds by its batch
            shared_TD = shared_TD * sigmoid_of((x_TD * self.shared_gate).sum(-1, keepdim=True), lora)
        return out_TD + shared_TD
