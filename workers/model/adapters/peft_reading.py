"""The factors of an adapter from the files of other tools, by their names in `AdapterShape`: either layout of
peft_format.py. No torch.

Stock PEFT refuses to wrap `out_proj` of Nemotron's Mamba-2. An adapter that it made gets factors of zeros there, whose
gradients are zero: they stay what they are, and an export leaves them out. So does one of Qwen3.5 that has none for
the rates and decays of a gated delta rule, as is usual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from workers.model.adapters.peft_format import DELTA, PARTED, Array, PeftFormatError, short_names
from workers.model.adapters.shape import AdapterShape
from workers.model.families.table import plain_name

#: Names of experts' factors: of all experts, as in Tinker's layout; or of one, as in Mixtral's adapters.
_SHORT = re.compile(r"(\.experts\.(?:\d+\.)?)(w[123])")
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_EXPERT = re.compile(r"(?P<mlp>.+\.(?:mlp|mixer)\.experts)\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj)")
_PART = (
    r"(?P<part>self_attn|attention|linear_attn|mlp\.experts|mlp\.shared_experts?|mlp|mixer\.(?:shared_)?experts|mixer)"
)
_LAYER = re.compile(rf"model\.(?P<layer>layers\.\d+)\.{_PART}\.(?P<name>\w+)")
#: The name of a mixture in Mixtral's checkpoints, and so in adapters trained on it.
_MIXTRAL = ".block_sparse_moe."
#: The name of attention in Tinker's archives of gpt-oss (its cookbook's weights/_merge_gpt_oss.py).
_GPT_OSS = ".attn."
#: The modules of each part; attention has those of one of its kinds.
_MLP = ("gate_proj up_proj down_proj",)
_LATENT = tuple(f"{queries} kv_a_proj_with_mqa o_proj" for queries in ("q_a_proj", "q_proj"))
_PARTS = {"self_attn": ("q_proj k_proj v_proj o_proj", *_LATENT)}
_PARTS["attention"] = ("query_key_value dense",)
_PARTS["linear_attn"] = tuple(
    " ".join([*(f"in_proj_{name}" for name in names), "out_proj"]) for names in (*DELTA, ("qkv", "z"))
)
_PARTS |= dict.fromkeys(("mlp", "mlp.experts", "mlp.shared_experts", "mlp.shared_expert"), _MLP)
#: Names in Nemotron: of attention, of Mamba-2 by Tinker and by PEFT, of an MLP, and of the linears before and after
#: latent experts.
_PARTS["mixer"] = (
    "q_proj k_proj v_proj o_proj",
    "gate_proj x_proj out_proj",
    "in_proj out_proj",
    "in_proj",
    "up_proj down_proj",
    "fc1_latent_proj fc2_latent_proj",
)
_PARTS |= dict.fromkeys(("mixer.experts", "mixer.shared_experts"), ("up_proj down_proj",))
_MAY_BE_MISSING = re.compile(r"\.mixer\.attn\.out_[AB]$|\.attn\.whole_[ba]_B$")
#: The factors on the hidden side of experts.
_OUTER = (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B"))


def read_layout(found: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of either layout by their names in `AdapterShape`. Raises PeftFormatError."""
    factors = _stack_experts(_by_module(found))
    tensors: dict[str, Array] = {}
    groups: dict[tuple[str, str], dict[str, dict[str, Array]]] = {}
    for module, pair in factors.items():
        if pair.keys() != {"A", "B"}:
            raise PeftFormatError(f"module {module} has lora_{min(pair)} alone")
        if module in ("lm_head", "model.unembed_tokens"):
            tensors["unembed_A"], tensors["unembed_B"] = pair["A"], pair["B"]
            continue
        at = _LAYER.fullmatch(module)
        if at is None or not any(at["name"] in kind.split() for kind in _PARTS[at["part"]]):
            raise PeftFormatError(f"module {module} is not one that can be trained here")
        groups.setdefault((at["layer"], at["part"]), {})[at["name"]] = pair
    experts = ("mlp.experts", "mixer.experts")
    shared = all(_share(pairs) for (_, part), pairs in groups.items() if part in experts)
    for (layer, part), pairs in groups.items():
        kind = max(_PARTS[part], key=lambda kind: (len(pairs.keys() & set(kind.split())), -len(kind)))
        if pairs.keys() != set(kind.split()):
            raise PeftFormatError(f"{layer}.{part}: has {', '.join(sorted(pairs))}, needs {kind}")
        if part == "mixer" or part.startswith("mixer."):
            tensors.update(_mixer(f"{layer}.mixer.", part, pairs, shared=shared))
        elif part == "self_attn":
            tensors.update(_attn(f"{layer}.attn.", pairs))
        elif part == "linear_attn":
            tensors.update(_delta(layer, pairs))
        elif part == "attention":
            tensors |= {f"{layer}.attn.qkv_{factor}": x for factor, x in pairs["query_key_value"].items()}
            tensors |= {f"{layer}.attn.o_{factor}": x for factor, x in pairs["dense"].items()}
        elif part in ("mlp.shared_experts", "mlp.shared_expert"):
            own = {"mlp.shared_experts": "shared", "mlp.shared_expert": "shared_expert"}[part]
            tensors.update(_mlp(f"{layer}.mlp.{own}.", pairs, experts=False))
        elif part == "mlp" or shared:
            tensors.update(_mlp(f"{layer}.mlp.", pairs, experts=part == "mlp.experts"))
        else:
            tensors.update(_each(f"{layer}.mlp.", pairs))
    return tensors


def _mixer(at: str, part: str, pairs: Mapping[str, Mapping[str, Array]], *, shared: bool) -> dict[str, Array]:
    """A layer that is one thing: its part of a layer as elsewhere, by what it has."""
    if part == "mixer.shared_experts":
        return _mlp(f"{at}mlp.shared.", pairs, experts=False)
    if part == "mixer.experts":
        return _mlp(f"{at}mlp.", pairs, experts=True) if shared else _each(f"{at}mlp.", pairs)
    if "fc1_latent_proj" in pairs:
        sides = (("latent_in", "fc1_latent_proj"), ("latent_out", "fc2_latent_proj"))
        return {f"{at}mlp.{name}_{factor}": x for name, module in sides for factor, x in pairs[module].items()}
    if "q_proj" in pairs:
        return _attn(f"{at}attn.", pairs)
    if "up_proj" in pairs:
        return _mlp(f"{at}mlp.", pairs, experts=False)
    return _mamba(f"{at}attn.", pairs)


def _mamba(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    found = {f"{at}out_{factor}": x for factor, x in pairs.get("out_proj", {}).items()}
    if _whole_in(pairs):
        return found | {f"{at}whole_in_{factor}": x for factor, x in pairs["in_proj"].items()}
    if "in_proj" not in pairs:
        gate, values = pairs["gate_proj"], pairs["x_proj"]
        found[f"{at}in_A"] = _concatenate(at, [gate["A"], values["A"]])
        return found | {f"{at}gate_B": gate["B"], f"{at}x_B": values["B"]}
    (rank, rows), b = pairs["out_proj"]["A"].shape, pairs["in_proj"]["B"]
    gate_b, x_b = _blocks(f"{at}in_proj", b, (rows, rows), rank)
    return found | {f"{at}in_A": pairs["in_proj"]["A"], f"{at}gate_B": gate_b, f"{at}x_B": x_b}


def _blocks(name: str, b: Array, rows: Sequence[int], rank: int) -> list[Array]:
    """The factors of the parts of a linear (PARTED), which have `rows` outputs each: blocks of `b` on the diagonal."""
    last = [sum(rows[: part + 1]) for part in range(len(rows))]
    found = [
        b[end - size : end, part * rank :][:, :rank] for part, (end, size) in enumerate(zip(last, rows, strict=True))
    ]
    if b.shape[1] != len(rows) * rank or np.count_nonzero(b) != sum(np.count_nonzero(block) for block in found):
        raise PeftFormatError(
            f"{name}: of another rank, it must be of {len(rows)} parts with {rank} columns each alone"
        )
    return found


def _whole_in(pairs: Mapping[str, Mapping[str, Array]]) -> bool:
    """Whether a linear of which parts may have a pair each (PARTED) has one, of the rank that others have."""
    ranks = [len(pairs[name]["A"]) for name in PARTED if name in pairs]
    return bool(ranks) and ("out_proj" not in pairs or ranks[0] == len(pairs["out_proj"]["A"]))


def with_zeros(tensors: Mapping[str, Array], shape: AdapterShape) -> dict[str, Array]:
    """The result of `read_layout`, with zeros for factors that stock PEFT cannot have, or need not have."""
    missing = [slot for name, slot in shape.slots.items() if name not in tensors and _MAY_BE_MISSING.search(name)]
    return {**tensors, **{slot.name: np.zeros(slot.shape, np.float32) for slot in missing}}


def _by_module(found: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    modules: dict[str, dict[str, Array]] = {}
    for key, tensor in found.items():
        match = _KEY.fullmatch(key)
        if match is None and key.endswith(".base_layer.weight"):  # a frozen copy that PEFT adds to a trained head
            raise PeftFormatError(f"tensor {key} is the base's own: have PEFT save it with save_embedding_layers=False")
        if match is None:
            raise PeftFormatError(f"tensor {key} is no LoRA factor")
        if not tensor.size:  # for a product that the experts do not have
            continue
        long = {short: name for name, short in short_names(match["module"]).items()}
        module = _SHORT.sub(lambda short, long=long: f"{short[1]}{long.get(short[2], short[2])}", match["module"])
        module = plain_name(module.replace(_MIXTRAL, ".mlp.").replace(_GPT_OSS, ".self_attn."))
        modules.setdefault(module, {})[match["factor"]] = tensor
    return modules


def _stack_experts(modules: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
    """2-D factors of single experts, stacked as [E, ...] under the name of all experts."""
    stacked = {name: pair for name, pair in modules.items() if _EXPERT.fullmatch(name) is None}
    rows: dict[tuple[str, str], dict[int, Array]] = {}
    for name, pair in modules.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            for factor, tensor in pair.items():
                rows.setdefault((f"{match['mlp']}.{match['name']}", factor), {})[int(match["expert"])] = tensor
    for (name, factor), by_expert in rows.items():
        if sorted(by_expert) != list(range(len(by_expert))):
            raise PeftFormatError(f"{name}: factors of some experts are missing")
        try:
            stacked.setdefault(name, {})[factor] = np.stack([by_expert[e] for e in range(len(by_expert))])
        except ValueError:
            raise PeftFormatError(f"{name}: the experts' lora_{factor} differ in shape") from None
    return stacked


def _attn(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    output = pairs["o_proj"]
    found = {f"{at}o_A": output["A"], f"{at}o_B": output["B"]}
    if latent := pairs.get("kv_a_proj_with_mqa"):
        name = "q_a" if "q_a_proj" in pairs else "q"
        queries = pairs[f"{name}_proj"]
        found[f"{at}latent_A"] = _concatenate(at, [queries["A"], latent["A"]])
        return found | {f"{at}{name}_B": queries["B"], f"{at}kv_a_B": latent["B"]}
    found |= {f"{at}qkv_A": _concatenate(at, [pairs[f"{x}_proj"]["A"] for x in "qkv"])}
    return found | {f"{at}{x}_B": pairs[f"{x}_proj"]["B"] for x in "qkv"}


def _delta(layer: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    at, names = f"{layer}.attn.", next(names for names in DELTA if f"in_proj_{names[0]}" in pairs)
    found = {f"{at}out_{factor}": x for factor, x in pairs["out_proj"].items()}
    if names[0] == "qkv" and not _whole_in(pairs):
        return found | _in_parts(at, pairs)
    at += "whole_" if names[0] == "qkv" else ""
    nothing = np.zeros_like(pairs[f"in_proj_{names[0]}"]["A"])
    stacked = [pairs[f"in_proj_{name}"]["A"] if f"in_proj_{name}" in pairs else nothing for name in names]
    found[f"{at}in_A"] = _concatenate(layer, stacked)
    return found | {f"{at}{name}_B": pairs[f"in_proj_{name}"]["B"] for name in names if f"in_proj_{name}" in pairs}


def _in_parts(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """The factors of queries, keys, values and gates of a gated delta rule from one pair of three times the rank for
    the first three, and one for the last."""
    qkv, gate, (rank, values) = pairs["in_proj_qkv"], pairs["in_proj_z"], pairs["out_proj"]["A"].shape
    keys = (len(qkv["B"]) - values) // 2
    parts = zip("qkv", _blocks(f"{at}in_proj_qkv", qkv["B"], (keys, keys, values), rank), strict=True)
    in_a = _concatenate(at, [qkv["A"], gate["A"]])
    return {f"{at}in_A": in_a, f"{at}z_B": gate["B"], **{f"{at}{part}_B": b for part, b in parts}}


def _mlp(at: str, pairs: Mapping[str, Mapping[str, Array]], *, experts: bool) -> dict[str, Array]:
    *inner_a, down_b = (x[0] for x in _outer(pairs)) if experts else _outer(pairs)
    return _inner(at, pairs) | {f"{at}{_stacked(pairs)}_A": _concatenate(at, inner_a), f"{at}down_B": down_b}


def _each(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """`_mlp` for experts that do not share the outer factors."""
    experts = len(pairs["up_proj"]["B"])
    *inner_a, down_b = (_of_each(at, x, experts) for x in _outer(pairs))
    joined = {f"{at}each_{_stacked(pairs)}_A": _concatenate(at, inner_a, axis=1), f"{at}each_down_B": down_b}
    return _inner(at, pairs) | joined


def _stacked(pairs: Mapping[str, Mapping[str, Array]]) -> str:
    return "gate_up" if "gate_proj" in pairs else "up"


def _inner(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    factors = {"gate_B": ("gate_proj", "B"), "up_B": ("up_proj", "B"), "down_A": ("down_proj", "A")}
    return {at + name: pairs[module][factor] for name, (module, factor) in factors.items() if module in pairs}


def _outer(pairs: Mapping[str, Mapping[str, Array]]) -> list[Array]:
    return [pairs[name][factor] for name, factor in _OUTER if name in pairs]


def _concatenate(layer: str, factors: list[Array], axis: int = 0) -> Array:
    try:
        return np.concatenate(factors, axis)
    except ValueError:
        raise PeftFormatError(f"{layer}: the lora_A of its projections differ in shape") from None


def _share(pairs: Mapping[str, Mapping[str, Array]]) -> bool:
    """True if all experts have the same outer factors, which are [1 or E, ..]."""
    found = [pair[factor] for name, factor in _OUTER for pair in [pairs.get(name, {})] if factor in pair]
    return all(x.ndim == 3 and all(row.tobytes() == x[0].tobytes() for row in x[1:]) for x in found)


def _of_each(layer: str, factor: Array, experts: int) -> Array:
    if factor.ndim != 3 or len(factor) not in (1, experts):
        raise PeftFormatError(f"{layer}: factors of {experts} experts are needed, one has shape {list(factor.shape)}")
    return np.array(np.broadcast_to(factor, (experts, *factor.shape[1:])))
