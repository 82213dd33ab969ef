"""The one decoder: Qwen3, Qwen3-MoE and Llama, over packed tokens, with many adapters in one pass.

The trainer and TorchEngine both run this, which is how sampler and trainer agree. Weights are frozen parameters of
ordinary modules in the given dtype; activations, norms, router probabilities and everything of LoRA are float32.

Shapes: T packed tokens, D hidden, H heads, K key-value heads, V vocabulary, R selected rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from workers.model.attend import Attend, PackedAttend
from workers.model.config import DecoderConfig, RopeConfig
from workers.model.lora import LoraRows, Site, lora_linear, own_rows
from workers.model.memory import Saving, choose_saving
from workers.model.moe import Names, expert_block
from workers.model.native.gemm import pack

__all__ = ["Attend", "Decoder", "DecoderConfig", "LoraRows", "PackedAttend"]

#: Positions for which rotary angles are computed at a time.
ROTARY_BLOCK = 256

#: Called for every mixture layer with its index and the chosen experts [tokens, choices].
OnRoute = Callable[[int, Tensor], None]

#: In a replayed routing, for a token whose experts the router is to choose.
FREE = -1


class Decoder(nn.Module):
    """Token ids to hidden states, hidden states to logits. Weights are uninitialised until copied in."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.isolation = "padded"  # a mode of isolation.py, set by `probe`
        #: Bytes that a forward may keep for its backward; None: a share of the free memory (memory.py).
        self.activation_budget_bytes: int | None = None
        with torch.device(device):
            self.embed = _frozen(dtype, config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(_Layer(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = _frozen(torch.float32, config.hidden_size)
            self.head = self.embed if config.tie_embeddings else _frozen(dtype, config.vocab_size, config.hidden_size)
            self.inverse_wavelengths = nn.Buffer(rope_frequencies(config.rope, config.head_dim), persistent=False)
            self._angles: Tensor = nn.Buffer(torch.empty(2, 0, config.head_dim), persistent=False)
        self.unembed = Site("unembed_A", ("unembed_B",), (config.vocab_size,))

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def pack(self) -> None:
        """Make forward passes faster on a CPU, at the cost of a second copy of the weights in memory."""
        for weight in self.parameters():
            if (weight.dim() > 1 and weight is not self.embed) or weight is self.head:
                pack(weight)

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
        rotary = self._rotary(positions_T)
        saving = Saving.KEEP
        if torch.is_grad_enabled() and lora is not None and any(grad is not None for grad in lora.grads):
            saving = choose_saving(self.config, len(tokens_T), self.device, self.activation_budget_bytes)
        with save_on_cpu(pin_memory=True) if saving is Saving.OFFLOAD else nullcontext():
            for number, layer in enumerate(self.layers):
                forced = replay_MTK[mixture.index(number)] if replay_MTK is not None and number in mixture else None
                if saving is Saving.KEEP:
                    x_TD = layer(x_TD, rotary, attend, lora, on_route, forced)
                else:
                    x_TD = _recomputed(layer, x_TD, rotary, attend, lora, on_route, forced)
        return F.rms_norm(x_TD, self.norm.shape, self.norm, self.config.norm_eps)

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """Logits [R, V] float32 of selected rows; `lora` is over those rows (`LoraRows.select`)."""
        return lora_linear(hidden_RD, self.head, self.unembed, self.arranged(lora))

    def arranged(self, lora: LoraRows | None) -> LoraRows | None:
        """The same rows, computed group by group if this machine needs that for isolation."""
        return lora.kept_apart() if lora is not None and self.isolation == "per-segment" else lora

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles, [T, 1, head_dim] each.

        From a table that grows by whole blocks: the value at a position must not depend on where a token stands in the
        batch, as it does when a vectorised cos rounds the ends of a tensor differently. On a CUDA device, where reading
        the last position would wait for the device, the table has all positions of the context from the start."""
        if positions_T.is_cuda:
            last = self.config.context_length - 1
        else:
            last = int(positions_T.max()) if len(positions_T) else 0
        while last >= self._angles.shape[1]:
            with torch.inference_mode(False), torch.no_grad():
                start = self._angles.shape[1]
                positions = torch.arange(start, start + ROTARY_BLOCK, device=self.device).float()
                angles = positions[:, None] * self.inverse_wavelengths
                turn = torch.cat((angles, angles), dim=-1)
                self._angles = torch.cat((self._angles, torch.stack((turn.cos(), turn.sin()))), dim=1)
        cos, sin = self._angles.index_select(1, positions_T)
        return cos[:, None], sin[:, None]


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_eps = config.norm_eps
        self.attn_norm = _frozen(torch.float32, config.hidden_size)
        self.attn = _Attention(config, layer, dtype)
        self.mlp_norm = _frozen(torch.float32, config.hidden_size)
        self.mlp: nn.Module = _Experts(config, layer, dtype) if config.is_moe(layer) else _Mlp(config, layer, dtype)

    def forward(
        self,
        x_TD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        lora: LoraRows | None,
        on_route: OnRoute | None,
        forced_TK: Tensor | None,
    ) -> Tensor:
        normed = F.rms_norm(x_TD, self.attn_norm.shape, self.attn_norm, self.norm_eps)
        x_TD = x_TD + self.attn(normed, rotary, attend, lora)
        normed = F.rms_norm(x_TD, self.mlp_norm.shape, self.mlp_norm, self.norm_eps)
        out: Tensor = x_TD + self.mlp(normed, lora, on_route, forced_TK)
        return out


class _Attention(nn.Module):
    """Grouped-query attention; q, k and v are one fused product with one stacked A and a B each."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        q, kv, d = config.q_size, config.kv_size, config.hidden_size
        self.qkv = _frozen(dtype, q + 2 * kv, d)
        self.o = _frozen(dtype, d, q)
        self.q_norm = _frozen(torch.float32, config.head_dim) if config.qk_norm else None
        self.k_norm = _frozen(torch.float32, config.head_dim) if config.qk_norm else None
        at = f"layers.{layer}.attn."
        self.qkv_site = Site(at + "qkv_A", (at + "q_B", at + "k_B", at + "v_B"), (q, kv, kv))
        self.o_site = Site(at + "o_A", (at + "o_B",), (d,))

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, lora: LoraRows | None) -> Tensor:
        c = self.config
        qkv = lora_linear(x_TD, self.qkv, self.qkv_site, lora)
        q, k, v = torch.split(qkv, [c.q_size, c.kv_size, c.kv_size], dim=-1)
        q_THD = self._turn(q.view(-1, c.num_heads, c.head_dim), self.q_norm, rotary)
        k_TKD = self._turn(k.view(-1, c.num_kv_heads, c.head_dim), self.k_norm, rotary)
        v_TKD = v.view(-1, c.num_kv_heads, c.head_dim).to(self.qkv.dtype)
        out_THD = attend.attend(self.layer, q_THD, k_TKD, v_TKD)
        return lora_linear(out_THD.reshape(-1, c.q_size).float(), self.o, self.o_site, lora)

    def _turn(self, x_THD: Tensor, norm: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Norm over the head, then the rotary embedding, in the dtype of the weights, which is the cache's."""
        if norm is not None:
            x_THD = F.rms_norm(x_THD, norm.shape, norm, self.config.norm_eps)
        cos, sin = rotary
        first, second = x_THD.chunk(2, dim=-1)
        return (x_THD * cos + torch.cat((-second, first), dim=-1) * sin).to(self.qkv.dtype)


class _Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        f, d = config.intermediate_size, config.hidden_size
        self.gate_up = _frozen(dtype, 2 * f, d)
        self.down = _frozen(dtype, d, f)
        names = Names.of_layer(layer)
        self.gate_up_site = Site(names.gate_up_a, (names.gate_b, names.up_b), (f, f))
        self.down_site = Site(names.down_a, (names.down_b,), (d,))

    def forward(
        self, x_TD: Tensor, lora: LoraRows | None, _on_route: OnRoute | None, _forced_TK: Tensor | None
    ) -> Tensor:
        if lora is not None and lora.apart:
            own = zip(own_rows(x_TD, lora), lora.singles, strict=True)
            return torch.cat([self(x, single, None, None) for x, single in own])
        gate, up = lora_linear(x_TD, self.gate_up, self.gate_up_site, lora).chunk(2, dim=-1)
        return lora_linear(F.silu(gate) * up, self.down, self.down_site, lora)


class _Experts(nn.Module):
    """Router and experts. The router is frozen, so it needs no adapter; its gradient still flows to x."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        e, f, d = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.layer, self.choices, self.norm_topk = layer, config.experts_per_token, config.norm_topk
        self.router = _frozen(dtype, e, d)
        self.gate_up = _frozen(dtype, e, 2 * f, d)
        self.down = _frozen(dtype, e, d, f)
        self.names = Names.of_layer(layer)
        self.router_site = Site("", (), ())

    def forward(
        self, x_TD: Tensor, lora: LoraRows | None, on_route: OnRoute | None, forced_TK: Tensor | None
    ) -> Tensor:
        probabilities_TE = torch.softmax(lora_linear(x_TD, self.router, self.router_site, lora), dim=-1)
        weights_TK, experts_TK = torch.topk(probabilities_TE, self.choices, dim=-1)
        if forced_TK is not None:
            experts_TK = torch.where(forced_TK == FREE, experts_TK, forced_TK)
            weights_TK = probabilities_TE.gather(1, experts_TK)
        if self.norm_topk:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if on_route is not None:
            on_route(self.layer, experts_TK)
        return expert_block(x_TD, weights_TK, experts_TK, self.gate_up, self.down, self.names, lora)


def _recomputed(
    layer: nn.Module,
    x_TD: Tensor,
    rotary: tuple[Tensor, Tensor],
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
        out: Tensor = layer(x_TD, rotary, attend, lora, on_route if runs == 1 else None, forced_TK)
        return out

    return cast(Tensor, checkpoint(run, x_TD, use_reentrant=False, preserve_rng_state=False))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 planes. With a factor, wavelengths longer than the original
    context are stretched by it, short ones are kept and those between are blended (Llama 3.1)."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.factor is None:
        return plain
    wavelength = 2 * math.pi / plain
    longest = rope.original_context_length / rope.low_freq_factor
    shortest = rope.original_context_length / rope.high_freq_factor
    blend = (rope.original_context_length / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _frozen(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
