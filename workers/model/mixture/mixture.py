"""A mixture of experts: a router, the experts that it chooses from, and shared experts, which every token passes.

Latent experts (Nemotron 3) are narrower than the hidden state: one projection, common to all of them, makes their
input, and another brings their summed output back to the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workers.model.config import DecoderConfig
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Away, Experts, Names, expert_block
from workers.model.mixture.mlp import Mlp
from workers.model.mixture.router import Router
from workers.model.parts.frozen import frozen
from workers.model.parts.steady import sigmoid_of

#: Called for every mixture layer with its index and the chosen experts [tokens, choices].
OnRoute = Callable[[int, Tensor], None]


class Mixture(nn.Module):
    """One layer's mixture. The names of its adapter's tensors begin as `DecoderConfig.adapter_at` says."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        e, f, d, own = config.num_experts, config.moe_intermediate_size, config.hidden_size, config.expert_size
        at, parts = config.adapter_at(layer, "mlp"), len(config.gate.parts)
        self.layer, self.names, self._gate = layer, Names.at(at, config.gate), config.gate
        self.router = Router(config, dtype)
        self.latent_in = frozen(dtype, own, d) if config.expert_latent else None
        self.latent_out = frozen(dtype, d, own) if config.expert_latent else None
        self.latent_in_site = Site(at + "latent_in_A", (at + "latent_in_B",), (own,))
        self.latent_out_site = Site(at + "latent_out_A", (at + "latent_out_B",), (d,))
        self.gate_up = frozen(dtype, e, parts * f, own)
        self.down = frozen(dtype, e, own, f)
        self.gate_up_bias = frozen(torch.float32, e, parts * f) if config.expert_bias else None
        self.down_bias = frozen(torch.float32, e, d) if config.expert_bias else None
        #: Set if experts are spread over processes: then `gate_up`, its bias and `down` are of this process's experts
        #: alone.
        self.away: Away | None = None
        width = config.shared_intermediate_size
        self.shared = Mlp(config, f"{at}{config.shared_name}.", width, dtype) if width else None
        self.shared_gate = frozen(torch.float32, d) if config.shared_gate else None

    def forward(
        self, x_TD: Tensor, lora: LoraRows | None, on_route: OnRoute | None, forced_TK: Tensor | None
    ) -> Tensor:
        """out_TD, float32. `forced_TK`: experts that must be chosen (`Router.forward`)."""
        weights_TK, experts_TK = self.router(x_TD, lora, forced_TK)
        if on_route is not None:
            on_route(self.layer, experts_TK)
        out_TD = self._chosen(x_TD, weights_TK, experts_TK, self.experts(), lora)
        if self.shared is None:
            return out_TD
        shared_TD: Tensor = self.shared(x_TD, lora)
        if self.shared_gate is not None:  # a product with one row of weights rounds by its batch: summed here
            shared_TD = shared_TD * sigmoid_of((x_TD * self.shared_gate).sum(-1, keepdim=True), lora)
        return out_TD + shared_TD

    def experts(self) -> Experts:
        return Experts(self.gate_up, self.down, self._gate, self.gate_up_bias, self.down_bias, self.away)

    def _chosen(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, lora: LoraRows | None
    ) -> Tensor:
        if self.latent_in is None or self.latent_out is None:
            return expert_block(x_TD, weights_TK, experts_TK, experts, self.names, lora)
        inner = lora_linear(x_TD, self.latent_in, self.latent_in_site, lora)
        outer = expert_block(inner, weights_TK, experts_TK, experts, self.names, lora)
        return lora_linear(outer, self.latent_out, self.latent_out_site, lora)
