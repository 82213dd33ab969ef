"""Common parts of layers with a recurrence in place of attention: the products before and after the recurrence, and
their adapters.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.model.attend import Attend
from workers.model.config import DecoderConfig, DeltaConfig, MambaConfig
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.parts.rotary import Angles
from workers.model.recur import Recur, Recurrence


class Recurrent(nn.Module, Recurrence):
    """A layer that is a `Recurrence`. Its fused product `inputs` feeds the recurrence, and the product `out` follows.
    The adapter of `inputs` has one stacked A and a B for each part, or a pair of its own for each whole projection."""

    inputs: Tensor
    out: Tensor

    def __init__(self, config: DecoderConfig, layer: int, recurrence: DeltaConfig | MambaConfig) -> None:
        super().__init__()
        self.layer, self.norm_eps, self.packs = layer, config.norm_eps, False
        at = config.adapter_at(layer, "attn")
        self.in_site = Site.of(at + "in_A", recurrence.trained)
        self.whole_site = Site.of(at + "whole_in_A", recurrence.whole)
        self.out_site = Site(at + "out_A", (at + "out_B",), (config.hidden_size,))

    def forward(self, x_TD: Tensor, angles: Angles, attend: Attend, lora: LoraRows | None) -> Tensor:
        """out_TD, float32, from the normed hidden state x_TD. Raises TypeError if `attend` keeps no states."""
        if not isinstance(attend, Recur):
            raise TypeError(f"{type(attend).__name__} keeps no states, which {type(self).__name__} needs")
        projected = lora_linear(x_TD, self.inputs, self.in_site, lora, self.whole_site)
        y = attend.recur(self.layer, self, projected, apart=lora is not None and lora.apart)
        return lora_linear(y, self.out, self.out_site, lora)
