"""The one decoder of every family (`families/table.py`), over packed tokens, with many adapters in one pass.

A layer is put together by its config from the parts in `parts/`.

The trainer and TorchEngine both run this, which is how sampler and trainer agree. Weights are frozen parameters of
ordinary modules in the given dtype; activations, norms, router probabilities and everything of LoRA are float32; on a
device, what products with the weights take is rounded to their dtype once.

Shapes: T packed tokens, D hidden, H heads, K key-value heads, V vocabulary, R selected rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from workers.model.attend import Attend
from workers.model.config import DecoderConfig
from workers.model.lora import products as lora_products
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.memory import Saving, choose_saving
from workers.model.mixture.mixture import Mixture, OnRoute
from workers.model.mixture.mlp import Mlp
from workers.model.native.gemm import pack
from workers.model.native.joined import rms_norm
from workers.model.parts.attention import GroupedAttention
from workers.model.parts.frozen import frozen
from workers.model.parts.gated_delta import GatedDelta
from workers.model.parts.latent import LatentAttention
from workers.model.parts.mamba2 import Mamba2
from workers.model.parts.rotary import Angles, Rotary


class Decoder(nn.Module):
    """Token ids to hidden states, hidden states to logits. Weights are uninitialised until copied in."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.isolation = "padded"  # a mode of isolation.py, set by `probe`
        self.packed = False
        #: How many bytes a forward may keep for its backward; None: a share of the free memory (memory.py).
        self.activation_budget_bytes: int | None = None
        #: Set if experts are spread over processes (owned/): has all of them begin a step, and returns whether any
        #: recomputes.
        self.begin_step: Callable[[LoraRows | None, bool], bool] | None = None
        with torch.device(device):
            self.embed = frozen(dtype, config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(_Layer(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = frozen(torch.float32, config.hidden_size)
            self.head = self.embed if config.tie_embeddings else frozen(dtype, config.vocab_size, config.hidden_size)
            self.rotary = rotary_of(config)
        self.unembed = Site("unembed_A", ("unembed_B",), (config.vocab_size,))

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def pack(self) -> None:
        """Make forward passes faster on a CPU, at the cost of a second copy of the weights in memory."""
        served = [pack(weight) for weight in self.products()]
        for module in (self, *self.layers):
            module.packed = all(served)

    def products(self) -> list[nn.Parameter]:
        """The weights that rows are multiplied with."""
        found = {name: w for name, w in self.named_parameters() if w.dim() > 1 and not name.endswith(("bias", "conv"))}
        return [w for w in found.values() if w is not self.embed or w is self.head]

    def parts_of_products(self) -> list[Tensor]:
        """The parts of them that rows are multiplied with by themselves."""
        found = (module.by_head() for module in self.modules() if isinstance(module, LatentAttention))
        return [part for parts in found for part in parts]

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraRows | None = None,
        on_route: OnRoute | None = None,
        replay_MTK: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] float32 after the final norm. `replay_MTK` has the experts that tokens must choose in
        each of the M mixture layers, FREE for a token whose router chooses; their weights are the router's."""
        if lora is not None and len(lora) != len(tokens_T):
            raise ValueError(f"the adapters cover {len(lora)} rows, the batch has {len(tokens_T)} tokens")
        lora, mixture = self.arranged(lora), self.config.mixture_layers
        x_TD = F.embedding(tokens_T, self.embed).float()
        angles = self.rotary(positions_T)
        saving, where = Saving.KEEP, (self.device, self.dtype)
        if torch.is_grad_enabled() and lora is not None and any(grad is not None for grad in lora.grads):
            saving = choose_saving(self.config, len(tokens_T), where, self.activation_budget_bytes)
        if self.begin_step is not None and self.begin_step(lora, saving is not Saving.KEEP) and saving is Saving.KEEP:
            saving = Saving.RECOMPUTE
        with save_on_cpu(pin_memory=True) if saving is Saving.OFFLOAD else nullcontext():
            for number, layer in enumerate(self.layers):
                forced = replay_MTK[mixture.index(number)] if replay_MTK is not None and number in mixture else None
                if saving is Saving.KEEP:
                    x_TD = layer(x_TD, angles, attend, lora, on_route, forced)
                else:
                    x_TD = _recomputed(layer, x_TD, angles, attend, lora, on_route, forced)
        return rms_norm(x_TD, self.norm, self.config.norm_eps, packed=self.packed)

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """Logits [R, V] float32 of selected rows; `lora` is over those rows (`LoraRows.select`)."""
        return lora_linear(hidden_RD, self.head, self.unembed, self.arranged(lora))

    def arranged(self, lora: LoraRows | None) -> LoraRows | None:
        """The same rows, computed group by group if this machine needs that for isolation."""
        return lora.kept_apart() if lora is not None and self.isolation == "per-segment" else lora


def rotary_of(config: DecoderConfig) -> Rotary:
    turning = config.latent.rope_dim if config.latent else config.head_dim
    return Rotary(config.rope, turning, config.context_length)


#: Parts that read tokens other than their own.
Attention = GroupedAttention | LatentAttention | GatedDelta | Mamba2


class _Layer(nn.Module):
    """Attention (or a recurrence) and MLP, or one of them, each behind its norm and beside a residual; which ones
    follows from the config."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_eps, self.dtype, self.packed = config.norm_eps, dtype, False
        self.attn = self.mlp = None
        if config.has_attention(layer):
            self.attn_norm = frozen(torch.float32, config.hidden_size)
            self.attn = _attention(config, layer)(config, layer, dtype)
        if config.has_mlp(layer):
            self.mlp_norm = frozen(torch.float32, config.hidden_size)
            self.mlp = (
                Mixture(config, layer, dtype)
                if config.is_moe(layer)
                else Mlp(config, config.adapter_at(layer, "mlp"), config.intermediate_size, dtype)
            )

    def forward(
        self,
        x_TD: Tensor,
        angles: Angles,
        attend: Attend,
        lora: LoraRows | None,
        on_route: OnRoute | None,
        forced_TK: Tensor | None,
    ) -> Tensor:
        delta_TD: Tensor | None = None
        if self.attn is not None:
            x_TD, normed = self._normed(x_TD, None, self.attn_norm)
            delta_TD = self.attn(normed, angles, attend, lora)
        if self.mlp is None:
            return x_TD if delta_TD is None else x_TD + delta_TD
        x_TD, normed = self._normed(x_TD, delta_TD, self.mlp_norm)
        mixture = isinstance(self.mlp, Mixture)
        out: Tensor = x_TD + (self.mlp(normed, lora, on_route, forced_TK) if mixture else self.mlp(normed, lora))
        return out

    def _normed(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state plus `delta_TD` (if any), and the normalised sum."""
        if lora_products.on_device(x_TD):
            from workers.model.gpu.norms import add_norm  # Triton: only a GPU needs it

            return add_norm(x_TD, delta_TD, weight_D, self.norm_eps, self.dtype)
        x_TD = x_TD if delta_TD is None else x_TD + delta_TD
        return x_TD, rms_norm(x_TD, weight_D, self.norm_eps, packed=self.packed)


def _attention(config: DecoderConfig, layer: int) -> type[Attention]:
    if layer in config.recurrent_layers:
        return GatedDelta if config.delta is not None else Mamba2
    return LatentAttention if config.latent is not None else GroupedAttention


def _recomputed(
    layer: nn.Module,
    x_TD: Tensor,
    angles: Angles,
    attend: Attend,
    lora: LoraRows | None,
    on_route: OnRoute | None,
    forced_TK: Tensor | None,
) -> Tensor:
    """Run a layer so that the backward computes it again. `on_route` is called the first time only."""
    runs = 0

    def run(x_TD: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        out: Tensor = layer(x_TD, angles, attend, lora, on_route if runs == 1 else None, forced_TK)
        return out

    return cast(Tensor, checkpoint(run, x_TD, use_reentrant=False, preserve_rng_state=False))
