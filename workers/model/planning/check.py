"""What serving a model folder takes, from its config.json alone: nothing is loaded, and torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from workers.model.adapters.shape import AdapterShape
from workers.model.card import ModelCard
from workers.model.config import DecoderConfig
from workers.model.families.table import FAMILIES

#: Bytes of a number, by the settings' names of dtypes.
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
RANKS = (8, 16, 32, 64)
#: Bytes of a parameter in training: weight, gradient and two moments, float32 each.
TRAINING_BYTES = 16


@dataclass(frozen=True)
class Check:
    """`adapters`: rank -> parameters, when everything is trained. `state_bytes` of a sequence, float32."""

    card: ModelCard
    dtype: str
    parameters: int
    kv_bytes_per_token: int
    adapters: dict[int, int]
    state_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.parameters * ITEM_BYTES[self.dtype]

    def lines(self) -> list[str]:
        """The check's facts for people: one a line, the fact's name first."""
        config, family = self.card.config, FAMILIES[self.card.architecture]
        adapters = [
            f"adapter   rank {rank}: {n:,} parameters, {_size(n * 4)}; {_size(n * TRAINING_BYTES)} in training"
            for rank, n in self.adapters.items()
        ]
        return [
            f"family    {family.name} ({family.architecture}): supported",
            f"attention {family.attention}",
            f"mlp       {family.mlp}",
            *(f"trained   {flag}: {', '.join(names)}" for flag, names in trained(config).items()),
            f"weights   {self.parameters:,} parameters, {_size(self.weight_bytes)} in {self.dtype}",
            f"cache     {self.kv_bytes_per_token:,} bytes per token in {self.dtype}",
            *([f"state     {self.state_bytes:,} bytes per sequence in float32"] if self.state_bytes else []),
            *(["lookup    off: states of recurrent layers cannot be taken back"] if self.state_bytes else []),
            f"context   {config.context_length:,} tokens",
            *adapters,
        ]


def check_model(card: ModelCard, dtype: str = "bfloat16") -> Check:
    """The weights in memory hold a few numbers in float32 (norms, biases), which are counted as `dtype`."""
    config = card.config
    kv = len(config.attention_layers) * config.kept_size * ITEM_BYTES[dtype]
    adapters = {rank: AdapterShape(config, rank).num_parameters for rank in RANKS}
    return Check(card, dtype, numel(config), kv, adapters, config.state_bytes)


def trained(config: DecoderConfig) -> dict[str, list[str]]:
    """The linears, by their names in the checkpoint, that each of Tinker's flags means in this model."""
    mlp = [*(f"{part}_proj" for part in config.gate.parts), "down_proj"]
    at = "mixer" if config.mlp_layers else "mlp"
    mlps = [f"{at}.{name}" for name in mlp] if config.dense_mlp_layers else []
    if config.num_experts:
        mlps += [f"{at}.experts.*.{name}" for name in mlp]
    if config.expert_latent:
        mlps += [f"{at}.fc1_latent_proj", f"{at}.fc2_latent_proj"]
    if config.shared_intermediate_size:
        shared = "shared_expert" if config.shared_gate else "shared_experts"
        mlps += [f"{at}.{shared}.{name}" for name in mlp]
    attention = [f"{'mixer' if config.mlp_layers else 'self_attn'}.{name}_proj" for name in "qkvo"]
    if config.mamba is not None:
        attention += ["mixer.in_proj (gate and values)", "mixer.out_proj"]
    if config.delta is not None:
        attention += [f"linear_attn.in_proj_{name}" for name in config.delta.trained] + ["linear_attn.out_proj"]
    if config.fused_qkv:
        attention = ["attention.query_key_value", "attention.dense"]
    if config.latent:
        queries = "q_a_proj" if config.latent.q_rank else "q_proj"
        attention = [f"self_attn.{name}" for name in (queries, "kv_a_proj_with_mqa", "o_proj")]
    return {"train_attn": attention, "train_mlp": mlps, "train_unembed": ["lm_head"]}


def numel(config: DecoderConfig) -> int:
    """Parameters of the decoder."""
    c, d = config, config.hidden_size
    embeddings = (1 if c.tie_embeddings else 2) * c.vocab_size * d
    attention = c.qkv_bias * (c.query_size + 2 * c.kv_size) + c.o_bias * d
    attention += c.latent.q_rank + c.latent.kv_rank if c.latent else 0
    attention += {"head": 2 * c.head_dim, "whole": c.q_size + c.kv_size, "": 0}[c.qk_norm] + c.sinks * c.num_heads
    attention *= len(c.attention_layers)
    if c.recurrence is not None:
        attention += len(c.recurrent_layers) * c.recurrence.small_numel
    products = 1 + len(c.gate.parts)
    mixture = c.num_experts * (d + c.expert_bias * d + c.router.bias + c.router.correction) + c.shared_gate * d
    mixture += products * d * c.shared_intermediate_size + 2 * d * c.expert_latent
    mlps = (
        experts_numel(c)
        + len(c.mixture_layers) * mixture
        + len(c.dense_mlp_layers) * products * d * c.intermediate_size
    )
    norms = d * (1 + c.num_layers * (1 if c.mlp_layers else 2))
    return embeddings + norms + c.attention_numel + attention + mlps


def experts_numel(config: DecoderConfig) -> int:
    """The parameters that the owners of experts have (owned/): the experts' products, and the biases of the first
    ones."""
    c = config
    expert = (1 + len(c.gate.parts)) * c.expert_size * c.moe_intermediate_size
    return len(c.mixture_layers) * c.num_experts * (expert + c.expert_bias * 2 * c.moe_intermediate_size)


def unequal(config: DecoderConfig, ranks: int) -> str:
    """Why that many ranks cannot own the experts in equal shares; "" if they can."""
    if not config.num_experts:
        return "it has no experts that ranks could own"
    if config.num_experts % ranks:
        return f"{ranks} ranks cannot own its {config.num_experts} experts in equal shares"
    return ""


def kept_bytes(config: DecoderConfig) -> int:
    """Bytes that autograd keeps of one token in one layer, approximately: inputs and outputs of norms and linears,
    queries, keys and values before and after norm and rotation, and the inside of the MLP; float32."""
    attention = 7 * config.q_size + 6 * config.kv_size + 3 * (config.query_size - config.q_size)
    if config.recurrence is not None:
        attention = max(attention, 12 * config.recurrence.mixed_size + 12 * config.recurrence.value_size)
    dense = 5 * config.intermediate_size
    experts = config.experts_per_token * (2 * config.moe_intermediate_size + 16) + 3 * config.num_experts
    experts += 5 * config.shared_intermediate_size + 4 * config.expert_latent
    mlp = experts if config.num_experts else dense
    if config.mlp_layers:
        return 4 * (3 * config.hidden_size + max(attention, mlp))
    return 4 * (6 * config.hidden_size + attention + mlp)


def kept_on_device(config: DecoderConfig, itemsize: int) -> int:
    """The same on a GPU, beside weights of so many bytes each: where heads are turned and experts activated in one pass
    (model/gpu), what lies between is not kept, and what products took and gave is kept in the weights' dtype."""
    plain = config.recurrence is None and config.latent is None and not config.output_gate
    if not plain or config.qk_norm == "whole" or not config.num_experts or config.expert_bias or config.gate.limit:
        return kept_bytes(config)
    heads = 4 * (config.q_size + 2 * config.kv_size) + itemsize * (2 * config.q_size + 2 * config.kv_size)
    experts = config.experts_per_token * (2 * itemsize * config.moe_intermediate_size + 200) + 12 * config.num_experts
    shared = 4 * (5 * config.shared_intermediate_size + 4 * config.expert_latent)
    return (4 * 3 + 2 * itemsize) * config.hidden_size + heads + experts + shared


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
