"""Where every LoRA tensor of a run lies in its one flat arena.

One arena per run makes the optimizer one fused call, paging one memcpy and hashing one pass. Experts use the
shared-outer form: the factor on the hidden side is shared by all experts, the one on the expert side is per expert.
That is 3.6 times fewer parameters than a full pair per expert on Qwen3-30B-A3B, and what Tinker trains. An adapter from
another tool with a full pair for each expert (`shared` False), or for projections into a recurrence of which parts
have a pair each here (`whole`), keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workers.model.config import DecoderConfig

#: Format tag in adapter_config.json.
FORMAT = "weft-shared-outer-1"

#: Every tensor starts at a multiple of this many float32 elements, a cache line, so that kernels see the same alignment
#: at any rank.
ALIGNMENT = 16


@dataclass(frozen=True)
class Slot:
    """One tensor of the arena: `offset` counts float32 elements; `fan_in` is the number of inputs, which sets the scale
    of the initial values, and 0 for a B factor, which starts at zero.

    A B factor [.., out, r] is stored as [.., r, out]: matrix libraries are up to four times faster with the long side
    innermost, in its products and above all in those that compute its gradient."""

    name: str
    shape: tuple[int, ...]
    offset: int
    fan_in: int

    @property
    def turned(self) -> bool:
        """True if the last two dimensions are stored transposed."""
        return self.fan_in == 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        *outer, rows, columns = self.shape
        return (*outer, columns, rows) if self.turned else self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class AdapterShape:
    """The tensors of an adapter, in order. r rank, d hidden, f MLP width, E experts, V vocabulary:

    | layers.i.attn.qkv_A [3r,d], q_B, k_B, v_B [out,r], o_A [r,q], o_B [d,r]                       | train_attn    |
    | of a delta rule: in_A [4r,d], q_B, k_B, v_B, z_B, out_A, out_B                                | train_attn    |
    | of Qwen3-Next's: in_A [2r,d], qkvz_B, ba_B, out_A, out_B                                      | train_attn    |
    | of Mamba-2: in_A [2r,d], gate_B, x_B [value,r], out_A, out_B                                  | train_attn    |
    | `whole`: whole_in_A [4r,d], whole_qkv_B, whole_z_B, whole_b_B, whole_a_B; Mamba-2: whole_in_A, whole_in_B |   |
    | q, k and v one linear: qkv_A [r,d], qkv_B [out,r], o_A, o_B                                   | train_attn    |
    | latent attention: latent_A [2r,d], q_a_B or q_B, kv_a_B [out,r], o_A, o_B                     | train_attn    |
    | layers.i.mlp.gate_up_A [2r,d], gate_B, up_B [f,r], down_A [r,f], down_B [d,r]                 | train_mlp     |
    | of experts: gate_B, up_B [E,f,r] and down_A [E,r,f] per expert, gate_up_A and down_B shared   | train_mlp     |
    | not `shared`: each_gate_up_A [E,2r,d] and each_down_B [E,d,r] instead of gate_up_A and down_B  | train_mlp     |
    | without a gate: up_A [r,d], or each_up_A, and no gate_B                                       | train_mlp     |
    | of latent experts, before and after them: latent_in_A, latent_in_B, latent_out_A, latent_out_B | train_mlp     |
    | experts of every token: layers.i.mlp.shared.gate_up_A and so on, as of a dense MLP            | train_mlp     |
    | (one that has a gate: layers.i.mlp.shared_expert.gate_up_A)                                   | train_mlp     |
    | unembed_A [r,d], unembed_B [V,r]                                                              | train_unembed |

    Where a layer has attention or an MLP, not both, the names begin with layers.i.mixer.attn and layers.i.mixer.mlp.
    `only`: these tensors alone.
    """

    config: DecoderConfig = field(repr=False)
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    shared: bool = True
    whole: bool = False
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("an adapter must train something: set train_attn, train_mlp or train_unembed")

    @classmethod
    def of_tensors(cls, config: DecoderConfig, rank: int, names: Collection[str]) -> AdapterShape:
        """The shape of an adapter with tensors of these names. Raises ValueError as the constructor does."""
        attn, mlp, unembed = (any(part in name for name in names) for part in (".attn.", ".mlp.", "unembed_"))
        each, whole = (any(part in name for name in names) for part in (".each_", ".whole_"))
        return cls(config, rank, attn, mlp, unembed, not each, whole)

    @cached_property
    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        offset = 0
        for name, shape, fan_in in self._tensors():
            if self.only and name not in self.only:
                continue
            slots[name] = Slot(name, shape, offset, fan_in)
            offset += -(-slots[name].numel // ALIGNMENT) * ALIGNMENT
        return slots

    @cached_property
    def numel(self) -> int:
        """Length of the arena in float32 elements, the padding between tensors included."""
        last = list(self.slots.values())[-1]
        return last.offset + -(-last.numel // ALIGNMENT) * ALIGNMENT

    @property
    def in_size(self) -> int:
        """Outputs of the model's Mamba-2's `in_proj`, which exports need to know (peft_format.py); 0 without one."""
        return self.config.mamba.in_size if self.config.mamba is not None else 0

    @property
    def mixtral(self) -> bool:
        """True if PEFT and vLLM know the experts by the names that Mixtral's checkpoints use (peft_format.py)."""
        return self.config.architecture == "MixtralForCausalLM"

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, without padding."""
        return sum(slot.numel for slot in self.slots.values())

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        config, r, d = self.config, self.rank, self.config.hidden_size
        for layer in range(config.num_layers):
            if self.train_attn and config.has_attention(layer):
                recurrent = layer in config.recurrent_layers
                yield from (self._recurrent if recurrent else self._attn)(config.adapter_at(layer, "attn"))
            if self.train_mlp and config.has_mlp(layer):
                yield from self._mlp_of(config.adapter_at(layer, "mlp"), config.is_moe(layer))
        if self.train_unembed:
            yield "unembed_A", (r, d), d
            yield "unembed_B", (config.vocab_size, r), 0

    def _attn(self, at: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
        c, r, d = self.config, self.rank, self.config.hidden_size
        if latent := c.latent:
            yield at + "latent_A", (2 * r, d), d
            yield (at + "q_a_B", (latent.q_rank, r), 0) if latent.q_rank else (at + "q_B", (c.q_size, r), 0)
            yield at + "kv_a_B", (latent.kept, r), 0
        elif c.fused_qkv:
            yield at + "qkv_A", (r, d), d
            yield at + "qkv_B", (c.q_size + 2 * c.kv_size, r), 0
        else:
            yield at + "qkv_A", (3 * r, d), d
            yield at + "q_B", (c.query_size, r), 0
            yield at + "k_B", (c.kv_size, r), 0
            yield at + "v_B", (c.kv_size, r), 0
        yield at + "o_A", (r, c.out_size), c.out_size
        yield at + "o_B", (d, r), 0

    def _recurrent(self, at: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
        c, r, d = self.config, self.rank, self.config.hidden_size
        assert c.recurrence is not None
        value = c.recurrence.value_size
        whole = c.recurrence.whole if self.whole else {}
        parts = whole or c.recurrence.trained
        yield at + ("whole_in_A" if whole else "in_A"), (len(parts) * r, d), d
        for name, size in parts.items():
            yield f"{at}{name}_B", (size, r), 0
        yield at + "out_A", (r, value), value
        yield at + "out_B", (d, r), 0

    def _mlp_of(self, at: str, moe: bool) -> Iterator[tuple[str, tuple[int, ...], int]]:
        config = self.config
        if not moe:
            yield from self._mlp(at, config.intermediate_size)
            return
        yield from self._mlp(at, config.moe_intermediate_size, (config.num_experts,))
        if config.expert_latent:
            yield from self._pair(f"{at}latent_in", config.hidden_size, config.expert_latent)
            yield from self._pair(f"{at}latent_out", config.expert_latent, config.hidden_size)
        if config.shared_intermediate_size:
            yield from self._mlp(f"{at}{config.shared_name}.", config.shared_intermediate_size)

    def _mlp(self, at: str, f: int, per: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """The tensors of an MLP; `per` is the number of experts, if any."""
        r, d, parts = self.rank, self.config.expert_size if per else self.config.hidden_size, self.config.gate.parts
        each, stacked, rows = per and not self.shared, "_".join(parts), len(parts) * self.rank
        yield (f"{at}each_{stacked}_A", (*per, rows, d), d) if each else (f"{at}{stacked}_A", (rows, d), d)
        for part in parts:
            yield f"{at}{part}_B", (*per, f, r), 0
        yield at + "down_A", (*per, r, f), f
        yield (at + "each_down_B", (*per, d, r), 0) if each else (at + "down_B", (d, r), 0)

    def _pair(self, name: str, inner: int, outer: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        yield f"{name}_A", (self.rank, inner), inner
        yield f"{name}_B", (outer, self.rank), 0


def adapter_config(
    shape: AdapterShape,
    base_model: str,
    *,
    alpha: float,
    scale: float,
    extra: Collection[str] = (),
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of adapter_config.json; `extra` names the tensors in extra.safetensors."""
    return {
        "format": FORMAT,
        "base_model": base_model,
        "rank": shape.rank,
        "alpha": alpha,
        "scale": scale,
        "train_attn": shape.train_attn,
        "train_mlp": shape.train_mlp,
        "train_unembed": shape.train_unembed,
        "shared_experts": shape.shared,
        "whole_projections": shape.whole,
        **({"in_size": shape.in_size} if shape.in_size else {}),
        **({"mixtral": True} if shape.mixtral else {}),
        "extra": sorted(extra),
        "details": dict(details or {}),
    }
