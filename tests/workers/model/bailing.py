"""Ling 2 and Ring 2 (BailingMoeV2ForCausalLM) in plain torch, after the code that their checkpoints carry, with the
names of its tensors: transformers has no class for them. Slow: no cache, each expert over all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class BailingConfig(PreTrainedConfig):
    model_type = "bailing_moe"


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.turned, self.theta = int(c.head_dim * c.partial_rotary_factor), c.rope_theta
        self.query_key_value = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.query_layernorm = nn.RMSNorm(self.dim, c.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(self.dim, c.rms_norm_eps)
        self.dense = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.query_key_value(x).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self.turn(self.query_layernorm(q)), self.turn(self.key_layernorm(k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        ahead = torch.full((length, length), -torch.inf).triu(1)
        weights = torch.softmax(q @ k.transpose(2, 3) / self.dim**0.5 + ahead, dim=-1)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))

    def turn(self, x: Tensor) -> Tensor:
        """Apply RoPE to the first part of each head; it pairs the first half of that part with the second."""
        half = self.turned // 2
        speed = 1.0 / self.theta ** (torch.arange(half) * 2 / self.turned)
        angle = torch.arange(x.shape[2])[:, None] * speed
        a, b, rest = torch.split(x, [half, half, self.dim - self.turned], dim=-1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), dim=-1)


class Mlp(nn.Module):
    def __init__(self, c: Any, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.expert_bias = nn.Buffer(torch.zeros(c.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """The weight of each expert for each token [T, E]; 0 for experts that are not chosen."""
        c, scores = self.c, torch.sigmoid(x @ self.weight.T)
        ranked = scores + self.expert_bias
        groups = ranked.view(len(x), c.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        inside = torch.zeros(len(x), c.n_group, dtype=torch.bool).scatter(1, best, True)
        ranked = groups.masked_fill(~inside[..., None], -torch.inf).flatten(1)
        chosen = ranked.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, chosen, weights)


class Mixture(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = nn.ModuleList(Mlp(c, c.moe_intermediate_size) for _ in range(c.num_experts))
        self.shared_experts = Mlp(c, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.gate(flat)
        out = torch.stack([weights[:, e, None] * expert(flat) for e, expert in enumerate(self.experts)]).sum(0)
        return out.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2)
        )
        self.attention = Attention(c)
        self.mlp = Mlp(c, c.intermediate_size) if layer < c.first_k_dense_replace else Mixture(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)


class BailingMoeV2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BailingConfig
    base_model_prefix = "model"

    def __init__(self, config: BailingConfig) -> None:
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Any = None, **ignored: Any
    ) -> dict[str, Tensor]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor, **ignored: Any) -> CausalLMOutput:
        x = self.model.word_embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))
