"""Grouped-query attention, with the options of model families: biases, norms of queries and keys, a sliding window,
sinks, a gate on the output of each head.

Shapes: T packed tokens, D hidden (of a head in q_THD, k_TKD and v_TKD), H query heads, K kv heads, Q = H times the
head's size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.attend import Attend, Reach
from workers.model.config import DecoderConfig
from workers.model.lora import products as lora_products
from workers.model.lora.linear import Site, lora_linear, lora_linear_then
from workers.model.lora.rows import LoraRows
from workers.model.native import joined
from workers.model.native.gemm import packed
from workers.model.parts.frozen import frozen
from workers.model.parts.rotary import Angles, turn
from workers.model.parts.steady import sigmoid_of


class GroupedAttention(nn.Module):
    """q, k and v are one fused product with the frozen `qkv`. Its adapter has one stacked A and a B for each of the
    three; or one A and one B in families whose checkpoints have one linear for it."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        q, kv, d = config.q_size, config.kv_size, config.hidden_size
        self.sizes = (config.query_size, kv, kv)
        self.qkv = frozen(dtype, sum(self.sizes), d)
        self.qkv_bias = frozen(torch.float32, sum(self.sizes)) if config.qkv_bias else None
        self.o = frozen(dtype, d, q)
        self.o_bias = frozen(torch.float32, d) if config.o_bias else None
        widths = {"head": (config.head_dim, config.head_dim), "whole": (q, kv)}.get(config.qk_norm)
        self.q_norm = frozen(torch.float32, widths[0]) if widths else None
        self.k_norm = frozen(torch.float32, widths[1]) if widths else None
        self.sinks = frozen(torch.float32, config.num_heads) if config.sinks else None
        at = config.adapter_at(layer, "attn")
        self.qkv_site = Site(at + "qkv_A", (at + "q_B", at + "k_B", at + "v_B"), self.sizes)
        if config.fused_qkv:
            self.qkv_site = Site(at + "qkv_A", (at + "qkv_B",), (q + 2 * kv,))
        self.o_site = Site(at + "o_A", (at + "o_B",), (d,))

    def forward(self, x_TD: Tensor, angles: Angles, attend: Attend, lora: LoraRows | None) -> Tensor:
        """out_TD, float32, from the normed hidden state x_TD."""
        c, reach = self.config, Reach(self.config.window_of(self.layer), self.sinks)
        if lora_products.on_device(self.qkv) and not c.output_gate and c.qk_norm != "whole":
            from workers.model.gpu.heads import Heads  # Triton: only a GPU needs it

            counts, norms = (c.num_heads, c.num_kv_heads), (self.q_norm, self.k_norm)
            heads = Heads(counts, c.head_dim, norms, c.norm_eps, angles, self.qkv.dtype, self.qkv_bias)
            q_THD, k_TKD, v_TKD = lora_linear_then(x_TD, self.qkv, self.qkv_site, lora, heads)
            out_TQ = attend.attend(self.layer, q_THD, k_TKD, v_TKD, reach).reshape(-1, c.q_size)
            return self._out(out_TQ, lora)
        qkv = lora_linear(x_TD, self.qkv, self.qkv_site, lora)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias
        q, k, v = torch.split(qkv, list(self.sizes), dim=-1)
        gate = None
        if c.output_gate:  # the gate lies beside the queries of each head
            q, gate = (part.flatten(1) for part in q.view(len(q), c.num_heads, -1).chunk(2, dim=-1))
        q_THD = self._heads(q, c.num_heads, self.q_norm, angles)
        k_TKD = self._heads(k, c.num_kv_heads, self.k_norm, angles)
        v_TKD = v.view(-1, c.num_kv_heads, c.head_dim).to(self.qkv.dtype)
        out_THD = attend.attend(self.layer, q_THD, k_TKD, v_TKD, reach)
        out_TQ = out_THD.reshape(-1, c.q_size).float()
        if gate is not None:
            out_TQ = out_TQ * sigmoid_of(gate, lora)
        return self._out(out_TQ, lora)

    def _out(self, out_TQ: Tensor, lora: LoraRows | None) -> Tensor:
        out_TD = lora_linear(out_TQ, self.o, self.o_site, lora)
        return out_TD if self.o_bias is None else out_TD + self.o_bias

    def _heads(self, x: Tensor, heads: int, norm: Tensor | None, angles: Angles) -> Tensor:
        """[T, heads, D]: the norm, over each head or over all together, then the rotary embedding; in the dtype of the
        weights, which is the cache's."""
        if self.config.qk_norm != "whole" and packed(self.qkv) is not None and joined.serves(x):
            turned = joined.heads(x, heads, norm, self.config.norm_eps, angles)
            return turned.view(-1, heads, self.config.head_dim).to(self.qkv.dtype)
        if norm is not None and self.config.qk_norm == "whole":
            x = F.rms_norm(x, norm.shape, norm, self.config.norm_eps)
        x_THD = x.view(-1, heads, self.config.head_dim)
        if norm is not None and self.config.qk_norm == "head":
            x_THD = F.rms_norm(x_THD, norm.shape, norm, self.config.norm_eps)
        return turn(x_THD, angles).to(self.qkv.dtype)
