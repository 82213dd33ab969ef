"""The numbers and choices that define a decoder. No torch, no files: `families/` reads them from a model folder.

The API process (which must stay free of torch) and the workers get them through the same code, so they can never
disagree about what a model is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """A model folder that this decoder cannot serve; the message names model, path, feature and the way out."""

    def __init__(self, name: str, path: Path, problem: str, supported: str) -> None:
        super().__init__(f"model {name!r} at {path}: {problem}; supported: {supported}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is default, linear, llama3 or yarn; all but the first stretch wavelengths by
    `factor`, llama3 only those longer than the original context, yarn those that turn less than `beta_slow` times in
    it. `partial` is the share of a head that turns (0: positions are told by nothing but what recurrences keep);
    `attention_factor` multiplies cos and sin."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial: float = 1.0


@dataclass(frozen=True)
class RouterConfig:
    """How a mixture chooses its experts. `scores`: "softmax" over all experts, "sigmoid" of each, or "chosen", softmax
    over the chosen ones. With `correction` each expert has a frozen number that affects only the choice. Experts are
    chosen only from the best `groups_per_token` of their `groups`. Weights are multiplied by `scaling`."""

    scores: str = "softmax"
    correction: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    bias: bool = False


@dataclass(frozen=True)
class GateConfig:
    """The activation of an MLP: silu(gate) * up; with a `limit`, clamped as in gpt-oss. Not `gated`: relu(up)^2,
    without a gate."""

    limit: float | None = None
    alpha: float = 1.0
    gated: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """The projections that the activation takes."""
        return ("gate", "up") if self.gated else ("up",)


@dataclass(frozen=True)
class DeltaConfig:
    """The `layers` that have a gated delta rule instead of attention: a recurrence whose state, for each value head, is
    a matrix [key_dim, value_dim]. Queries, keys and values go through a causal convolution of `taps` positions first.
    `grouped`: one projection in which what belongs to a key head lies side by side, and a second one of two numbers for
    each value head; else four."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """The projections of a layer's input, by what they are called after `in_proj_`, and their widths."""
        if self.grouped:
            return {"qkvz": self.mixed_size + self.value_size, "ba": 2 * self.value_heads}
        return {"qkv": self.mixed_size, "z": self.value_size, "b": self.value_heads, "a": self.value_heads}

    @property
    def trained(self) -> dict[str, int]:
        """The first outputs of the projections, by parts with a pair of factors each. Of the four projections they are
        queries, keys, values and gates, as Tinker trains them; rates and decays have none."""
        if self.grouped:
            return self.projections
        key = self.key_heads * self.key_dim
        return {"q": key, "k": key, "v": self.value_size, "z": self.value_size}

    @property
    def whole(self) -> dict[str, int]:
        """The projections as stock PEFT trains them, if these differ: as they are."""
        return {} if self.grouped else {f"whole_{name}": width for name, width in self.projections.items()}

    @property
    def in_size(self) -> int:
        """Width of all projections of a layer's input together."""
        return sum(self.projections.values())

    @property
    def small_numel(self) -> int:
        """Parameters of a layer beside its products."""
        return self.taps * self.mixed_size + 2 * self.value_heads + self.value_dim

    @property
    def state_numel(self) -> int:
        """Numbers that are kept of a sequence in one layer: the matrices, and the last inputs of the convolution."""
        return self.value_size * self.key_dim + self.mixed_size * (self.taps - 1)


@dataclass(frozen=True)
class MambaConfig:
    """The `layers` that have Mamba-2 instead of attention: a recurrence whose state, for each head, is a matrix
    [state_dim, head_dim]. Heads are in `groups` that share what they write with and read by. What they write and both
    of these go through a causal convolution of `taps` positions first."""

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int

    @property
    def key_dim(self) -> int:
        """As `state_dim`, by the name that a delta rule has for it."""
        return self.state_dim

    @property
    def value_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution."""
        return self.value_size + 2 * self.groups * self.state_dim

    @property
    def in_size(self) -> int:
        """Width of the projection of a layer's input: the gate, what the convolution takes, a step for each head."""
        return self.value_size + self.mixed_size + self.heads

    @property
    def trained(self) -> dict[str, int]:
        """The first outputs of the projection, by parts with a pair of factors each, as Tinker trains them: the gate
        and the values."""
        return {"gate": self.value_size, "x": self.value_size}

    @property
    def whole(self) -> dict[str, int]:
        """The projection as stock PEFT trains it: undivided."""
        return {"whole_in": self.in_size}

    @property
    def small_numel(self) -> int:
        """Parameters of a layer beside its products."""
        return (self.taps + 1) * self.mixed_size + 3 * self.heads + self.value_size

    @property
    def state_numel(self) -> int:
        """Numbers that are kept of a sequence in one layer: the matrices, and the last inputs of the convolution."""
        return self.value_size * self.state_dim + self.mixed_size * (self.taps - 1)


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434). `kv_rank` numbers of a token give the keys (`plain_dim` each)
    and values (`value_dim` each) of all heads; `rope_dim` more, which turn with the position, end the key of every
    head. Queries come of `q_rank` numbers (0: of the hidden state). Scores are multiplied by `scale`. `interleaved`:
    the two numbers of a plane that turns are neighbours."""

    q_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True

    @property
    def kept(self) -> int:
        """Numbers that the cache keeps of a token in a layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class DecoderConfig:
    """The whole shape of a decoder. `num_experts` 0 means every layer is dense; in a mixture-of-experts model
    `dense_layers` names the layers that are dense all the same. `intermediate_size` is the width of a dense MLP,
    `moe_intermediate_size` that of one expert, `shared_intermediate_size` that of the experts that every token has (0:
    none). With `fused_qkv`, queries, keys and values are one linear, with one adapter. `qk_norm` is "head", "whole"
    (over all heads together) or "". Layers in `window_layers` attend to the last `window` positions, the token's own
    included. With `latent`, attention is that, and `head_dim` the width of a query. A checkpoint may hold
    `prediction_layers` more layers, which are not loaded. With `output_gate` every head of attention has a gate on what
    it gives, projected with the queries; with `shared_gate` so have the shared experts, which are then one expert. With
    `expert_latent` experts compute with so many numbers of a token, which are projected from the hidden state and back.
    With `mlp_layers` each layer has one norm, and an MLP if it is one of these or else attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qk_norm: str = "head"
    fused_qkv: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    window: int = 0
    window_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    norm_topk: bool = False
    dense_layers: tuple[int, ...] = ()
    router: RouterConfig = RouterConfig()
    gate: GateConfig = GateConfig()
    expert_bias: bool = False
    prediction_layers: int = 0
    output_gate: bool = False
    shared_gate: bool = False
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    latent: LatentConfig | None = None
    expert_latent: int = 0
    mlp_layers: tuple[int, ...] = ()

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    def is_moe(self, layer: int) -> bool:
        """True if this layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and self.has_mlp(layer) and layer not in self.dense_layers

    def has_mlp(self, layer: int) -> bool:
        return not self.mlp_layers or layer in self.mlp_layers

    def has_attention(self, layer: int) -> bool:
        """True if this layer has attention, or a recurrence in its place."""
        return layer not in self.mlp_layers

    def adapter_at(self, layer: int, part: str) -> str:
        """The prefix of an adapter's tensors in a layer's "attn" or "mlp"."""
        return f"layers.{layer}.{'mixer.' if self.mlp_layers else ''}{part}."

    def window_of(self, layer: int) -> int:
        """How many positions this layer attends to; 0: all."""
        return self.window if layer in self.window_layers else 0

    @property
    def recurrence(self) -> DeltaConfig | MambaConfig | None:
        """The recurrence that some layers have instead of attention."""
        return self.delta or self.mamba

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return self.recurrence.layers if self.recurrence is not None else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values."""
        others = {*self.recurrent_layers, *self.mlp_layers}
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def dense_mlp_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is no mixture."""
        return tuple(i for i in range(self.num_layers) if self.has_mlp(i) and not self.is_moe(i))

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrences' states of one sequence, in float32; they do not grow with its length."""
        return 4 * len(self.recurrent_layers) * self.recurrence.state_numel if self.recurrence is not None else 0

    @property
    def expert_size(self) -> int:
        """How many numbers of a token an expert takes and gives."""
        return self.expert_latent or self.hidden_size

    @property
    def shared_name(self) -> str:
        """The name in an adapter of the experts that every token has."""
        return "shared_expert" if self.shared_gate else "shared"

    @property
    def query_size(self) -> int:
        """Width of the projection of queries, with their gates."""
        return 2 * self.q_size if self.output_gate else self.q_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def out_size(self) -> int:
        """Width of the output of all heads of attention together."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kept_size(self) -> int:
        """Numbers that the cache keeps of a token in a layer."""
        return self.latent.kept if self.latent else 2 * self.kv_size

    @property
    def attention_size(self) -> int:
        """Parameters of the matrices of one layer's attention."""
        c, d = self.latent, self.hidden_size
        if c is None:
            return d * (self.query_size + self.q_size + 2 * self.kv_size)
        queries = (d + self.q_size) * c.q_rank if c.q_rank else d * self.q_size
        return queries + d * c.kept + c.kv_rank * self.num_heads * (c.plain_dim + c.value_dim) + d * self.out_size

    @property
    def attention_numel(self) -> int:
        """Parameters of the matrices of all layers' attention, or of what they have in its place."""
        attention = len(self.attention_layers) * self.attention_size
        if self.recurrence is None:
            return attention
        widths = self.recurrence.in_size + self.recurrence.value_size
        return attention + len(self.recurrent_layers) * self.hidden_size * widths

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The different widths of the model's MLPs, smallest first."""
        dense = self.intermediate_size if self.dense_mlp_layers else 0
        return tuple(sorted({dense, self.moe_intermediate_size, self.shared_intermediate_size} - {0}))

    @property
    def gate_widths(self) -> tuple[int, ...]:
        """The widths of all sigmoids used as gates."""
        return ((self.q_size,) if self.output_gate else ()) + ((1,) if self.shared_gate else ())

    @property
    def active_parameters(self) -> int:
        """The numbers in the matrices that one token is multiplied with: attention, the chosen and shared experts or
        the MLP, the head."""
        d, products = self.hidden_size, 1 + len(self.gate.parts)
        dense = len(self.dense_mlp_layers) * products * d * self.intermediate_size
        experts = products * self.experts_per_token * self.expert_size * self.moe_intermediate_size
        experts += d * (products * self.shared_intermediate_size + 2 * self.expert_latent + self.num_experts)
        return self.attention_numel + dense + len(self.mixture_layers) * experts + d * self.vocab_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data
