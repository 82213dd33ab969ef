"""A dense MLP: down(activated(gate x, up x)), or down(activated(up x)) without a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.config import DecoderConfig
from workers.model.lora.linear import Site, lora_linear, own_rows
from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Names
from workers.model.mixture.gate import activated
from workers.model.parts.frozen import frozen


class Mlp(nn.Module):
    """`at`: the prefix of its adapter's tensors; `width`: the size between its products."""

    def __init__(self, config: DecoderConfig, at: str, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        d = config.hidden_size
        parts = len(config.gate.parts)
        self.gate_up = frozen(dtype, parts * width, d)
        self.down = frozen(dtype, d, width)
        self._gate = config.gate
        names = Names.at(at, config.gate)
        self.gate_up_site = Site(names.gate_up_a, names.inner_b, (width,) * parts)
        self.down_site = Site(names.down_a, (names.down_b,), (d,))

    def forward(self, x_TD: Tensor, lora: LoraRows | None) -> Tensor:
        if lora is not None and lora.apart:
            own = zip(own_rows(x_TD, lora), lora.singles, strict=True)
            return torch.cat([self(x, single) for x, single in own])
        gate_up = lora_linear(x_TD, self.gate_up, self.gate_up_site, lora)
        return lora_linear(activated(self._gate, gate_up), self.down, self.down_site, lora)
