"""Latent attention (DeepSeek-V2, arXiv 2405.04434). The keys and values of all heads are made from a few numbers of
each token, its latent; besides, each key has a part that is rotated by the position and is the same for every head.

The trainer makes the keys and values of each head. The generator's cache keeps only latents and rotated parts: each
head's query is multiplied by that head's key matrix, so that it attends to latents directly; the output mixes latents,
and the head's value matrix is applied last. Both give the same numbers up to rounding.

Shapes: T packed tokens, D hidden (in q_THD and k_TKD: of a head), H heads, C latent, N the part of a head's key that is
not rotated, V value of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.attend import Attend
from workers.model.config import DecoderConfig
from workers.model.lora.base_mm import per_expert
from workers.model.lora.linear import Site, lora_linear, own_rows
from workers.model.lora.rows import LoraRows
from workers.model.parts.frozen import frozen
from workers.model.parts.rotary import Angles, pairs_apart, turn

#: The epsilon of the latents' norms, whatever that of the model's other norms is (as in the published code).
NORM_EPS = 1e-6

_NO_SITE = Site("", (), ())


class LatentAttention(nn.Module):
    """Adapters are on the products that read and write the hidden state; those from latents to heads are frozen, as in
    Tinker. `down` is the fused product of the hidden state: queries (or their latents), and the latent and the rotated
    part of the key."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.latent is not None
        self.layer, self.config, self.latent = layer, config, config.latent
        c, d, heads = config.latent, config.hidden_size, config.num_heads
        sizes = (c.q_rank or config.q_size, c.kept)
        self.down = frozen(dtype, sum(sizes), d)
        self.q_norm = frozen(torch.float32, c.q_rank) if c.q_rank else None
        self.q_up = frozen(dtype, config.q_size, c.q_rank) if c.q_rank else None
        self.kv_norm = frozen(torch.float32, c.kv_rank)
        self.kv_up = frozen(dtype, heads * (c.plain_dim + c.value_dim), c.kv_rank)
        self.o = frozen(dtype, d, config.out_size)
        at = config.adapter_at(layer, "attn")
        self.down_site = Site(at + "latent_A", (at + ("q_a_B" if c.q_rank else "q_B"), at + "kv_a_B"), sizes)
        self.o_site = Site(at + "o_A", (at + "o_B",), (d,))

    def by_head(self) -> tuple[Tensor, Tensor]:
        """The matrices from a latent to each head's key [H, N, C] and to its value [H, V, C]."""
        parts_HOC = self.kv_up.view(self.config.num_heads, -1, self.latent.kv_rank)
        return parts_HOC[:, : self.latent.plain_dim], parts_HOC[:, self.latent.plain_dim :]

    def forward(self, x_TD: Tensor, angles: Angles, attend: Attend, lora: LoraRows | None) -> Tensor:
        """out_TD, float32, from the normed hidden state x_TD; over latents if `attend` keeps these."""
        c = self.latent
        sizes = [self.down_site.sizes[0], c.kv_rank, c.rope_dim]
        q, latent_TC, k_turning = torch.split(lora_linear(x_TD, self.down, self.down_site, lora), sizes, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = lora_linear(F.rms_norm(q, self.q_norm.shape, self.q_norm, NORM_EPS), self.q_up, _NO_SITE, lora)
        q_THN, q_turning = torch.split(q.view(len(q), -1, self.config.head_dim), [c.plain_dim, c.rope_dim], dim=-1)
        q_turning, k_turning = self._turn(q_turning, angles), self._turn(k_turning[:, None], angles)
        latent_TC = F.rms_norm(latent_TC, self.kv_norm.shape, self.kv_norm, NORM_EPS)
        make = self._of_latents if attend.latent else self._of_heads
        out_THV = make(q_THN, q_turning, latent_TC, k_turning, attend, lora)
        return lora_linear(out_THV.flatten(1).float(), self.o, self.o_site, lora)

    def _turn(self, x_THD: Tensor, angles: Angles) -> Tensor:
        return turn(pairs_apart(x_THD) if self.latent.interleaved else x_THD, angles)

    def _of_heads(
        self,
        q_THN: Tensor,
        q_turning: Tensor,
        latent_TC: Tensor,
        k_turning: Tensor,
        attend: Attend,
        lora: LoraRows | None,
    ) -> Tensor:
        """[T, H, V]: attention over the keys and values of each head, made here."""
        heads, dim, value_dim = self.config.num_heads, self.config.head_dim, self.latent.value_dim
        up_THO = lora_linear(latent_TC, self.kv_up, _NO_SITE, lora).view(len(latent_TC), heads, -1)
        k_THN, v_THV = torch.split(up_THO, [self.latent.plain_dim, value_dim], dim=-1)
        k_THD = torch.cat((k_THN, k_turning.expand(-1, heads, -1)), dim=-1)
        # Padded to one width, which the fused kernels need.
        width = max(dim, value_dim)
        q_THD, k_THD = (F.pad(x, (0, width - dim)) for x in (torch.cat((q_THN, q_turning), dim=-1), k_THD))
        return self._attend(attend, q_THD, k_THD, F.pad(v_THV, (0, width - value_dim)))[..., :value_dim]

    def _of_latents(
        self,
        q_THN: Tensor,
        q_turning: Tensor,
        latent_TC: Tensor,
        k_turning: Tensor,
        attend: Attend,
        lora: LoraRows | None,
    ) -> Tensor:
        """[T, H, V]: attention over latents. To the `attend` it is attention with one kv head, whose key is latent and
        rotated part, and whose value is the latent, the first C numbers of the key. No gradients."""
        k_up_HNC, v_up_HVC = self.by_head()
        q_THC = _each_head(q_THN, k_up_HNC, lora, transposed=True)
        k_T1C = torch.cat((latent_TC[:, None], k_turning), dim=-1)
        out_THC = self._attend(attend, torch.cat((q_THC, q_turning), dim=-1), k_T1C, latent_TC[:, None])
        return _each_head(out_THC.float(), v_up_HVC, lora)

    def _attend(self, attend: Attend, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        dtype = self.down.dtype
        q_THD = q_THD * (self.latent.scale * q_THD.shape[-1] ** 0.5)  # an Attend divides by the root of the width
        return attend.attend(self.layer, q_THD.to(dtype), k_TKD.to(dtype), v_TKD.to(dtype))


def _each_head(x_THI: Tensor, weight_HOI: Tensor, lora: LoraRows | None, *, transposed: bool = False) -> Tensor:
    """Each head's rows times its own weight, [T, H, O], float32: x W^T, or x W if `transposed`."""
    if lora is not None and lora.apart:
        return torch.cat([_each_head(own, weight_HOI, None, transposed=transposed) for own in own_rows(x_THI, lora)])
    rows, heads, inner = x_THI.shape
    ends_H = torch.arange(1, heads + 1, dtype=torch.int32, device=x_THI.device) * rows
    y_PO = per_expert(x_THI.transpose(0, 1).reshape(-1, inner), weight_HOI, ends_H, transposed=transposed)
    return y_PO.view(heads, rows, -1).transpose(0, 1).float()
