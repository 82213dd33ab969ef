"""Adapters as other tools read them: adapter_model.safetensors with an adapter_config.json. No torch, so that the API
can write one too.

Two layouts say the same thing, and differ only for experts and for the unembedding (r rank, E experts):

| | PEFT, vLLM | Tinker, its cookbook |
|---|---|---|
| experts | `mlp.experts.{e}.gate_proj` A [r,d], 2-D for each | `mlp.experts.w1` A [1 or E,r,d]; w2 is down, w3 up |
| unembedding | `lm_head` | `model.unembed_tokens` |

An export has Tinker's layout in its root, because every Tinker tool reads the root, and PEFT's in `peft/` where the two
differ. Weft shares the hidden-side factor of experts among them: Tinker's layout keeps it
once, PEFT's repeats it for every expert. Reading takes either and gives back exactly the same bits. Where experts do
not share it, because another tool trained it, each keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_FOLDER = "peft"

_PREFIX = "base_model.model."
_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_LONG_NAMES = {short: name for name, short in _EXPERT_NAMES.items()}
#: Of all experts, as Tinker's layout has it, or of one, as Mixtral's adapters have it.
_SHORT = re.compile(r"(\.experts\.(?:\d+\.)?)(w[123])")
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_EXPERT = re.compile(r"(?P<mlp>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj)")
_PART = r"(?P<part>self_attn|attention|linear_attn|mlp\.experts|mlp\.shared_experts?|mlp)"
_LAYER = re.compile(rf"model\.(?P<layer>layers\.\d+)\.{_PART}\.(?P<name>\w+)")
#: What Mixtral's checkpoints call a mixture, and so adapters that were trained on it.
_MIXTRAL = ".block_sparse_moe."
#: What names of the text model begin with in an adapter of a model that sees.
_SEEING = "model.language_model."
#: The modules of each part; attention's are those of one of its kinds.
_MLP = ("gate_proj up_proj down_proj",)
_LATENT = tuple(f"{queries} kv_a_proj_with_mqa o_proj" for queries in ("q_a_proj", "q_proj"))
#: The projections into a gated delta rule, in the order in which they are fused: of Qwen3-Next, and of Qwen3.5.
_DELTA = (("qkvz", "ba"), ("qkv", "z", "b", "a"))
_PARTS = {"self_attn": ("q_proj k_proj v_proj o_proj", *_LATENT)}
_PARTS["attention"] = ("query_key_value dense",)
_PARTS["linear_attn"] = tuple(" ".join([*(f"in_proj_{name}" for name in names), "out_proj"]) for names in _DELTA)
_PARTS |= dict.fromkeys(("mlp", "mlp.experts", "mlp.shared_experts", "mlp.shared_expert"), _MLP)
#: The factors on the hidden side of experts.
_OUTER = (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B"))


class PeftFormatError(ValueError):
    """Tensors that are not an adapter of the kind Weft trains; the message names one."""


# ---- writing


def write_export(folder: Path, tensors: Mapping[str, Array], *, base_model: str, rank: int, alpha: float) -> None:
    """Write `tensors` (by their names in `AdapterShape`) as an export into `folder`."""
    pairs = list(_pairs(tensors))
    root, peft = _tinker_layout(pairs), _peft_layout(pairs)
    same = root.keys() == peft.keys()
    modules = sorted({_module_of(key) for key in root})
    _write(folder, root, _config(base_model, rank, alpha, modules))
    if not same:
        modules = sorted({_module_of(key) for key in peft})
        _write(folder / PEFT_FOLDER, peft, _config(base_model, rank, alpha, modules))


def write_peft(folder: Path, tensors: Mapping[str, Array], *, base_model: str, rank: int, alpha: float) -> list[str]:
    """Write `tensors` in PEFT's layout alone. Returns the names of the modules it has factors for."""
    layout = _peft_layout(list(_pairs(tensors)))
    modules = sorted({_module_of(key) for key in layout})
    _write(folder, layout, _config(base_model, rank, alpha, modules))
    return modules


def _write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _config(base_model: str, rank: int, alpha: float, modules: list[str]) -> dict[str, Any]:
    whole = round(alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": whole if abs(alpha - whole) < 1e-9 * abs(alpha) else alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _pairs(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    """(transformers' name of the module, A, B); 3-D for experts, [1, ...] where they share the factor."""
    for name, a in tensors.items():
        if name == "unembed_A":
            yield "lm_head", a, tensors["unembed_B"]
        elif name.endswith(".attn.qkv_A") and name[:-1] + "B" in tensors:
            at = name.removesuffix("qkv_A")
            module = f"model.{at.removesuffix('attn.')}attention."
            yield f"{module}query_key_value", a, tensors[f"{at}qkv_B"]
            yield f"{module}dense", tensors[f"{at}o_A"], tensors[f"{at}o_B"]
        elif name.endswith(".attn.qkv_A"):
            at = name.removesuffix("qkv_A")
            module = f"model.{at.removesuffix('attn.')}self_attn."
            for part, part_a in zip("qkv", np.split(a, 3), strict=True):
                yield f"{module}{part}_proj", part_a, tensors[f"{at}{part}_B"]
            yield f"{module}o_proj", tensors[f"{at}o_A"], tensors[f"{at}o_B"]
        elif name.endswith(".attn.latent_A"):
            yield from _latent_pairs(name.removesuffix("latent_A"), tensors)
        elif name.endswith(".attn.in_A"):
            yield from _delta_pairs(name.removesuffix("in_A"), tensors)
        elif name.endswith((".mlp.gate_up_A", ".mlp.shared.gate_up_A", ".mlp.shared_expert.gate_up_A")):
            yield from _mlp_pairs(name.removesuffix("gate_up_A"), tensors)
        elif name.endswith(".mlp.each_gate_up_A"):
            yield from _each_pairs(name.removesuffix("each_gate_up_A"), tensors)


def _delta_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    module = f"model.{at.removesuffix('attn.')}linear_attn."
    names = next(names for names in _DELTA if f"{at}{names[0]}_B" in tensors)
    for name, a in zip(names, np.split(tensors[f"{at}in_A"], len(names)), strict=True):
        yield f"{module}in_proj_{name}", a, tensors[f"{at}{name}_B"]
    yield f"{module}out_proj", tensors[f"{at}out_A"], tensors[f"{at}out_B"]


def _latent_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    module, queries = f"model.{at.removesuffix('attn.')}self_attn.", "q_a" if f"{at}q_a_B" in tensors else "q"
    queries_a, latent_a = np.split(tensors[f"{at}latent_A"], 2)
    yield f"{module}{queries}_proj", queries_a, tensors[f"{at}{queries}_B"]
    yield f"{module}kv_a_proj_with_mqa", latent_a, tensors[f"{at}kv_a_B"]
    yield f"{module}o_proj", tensors[f"{at}o_A"], tensors[f"{at}o_B"]


def _mlp_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    gate_a, up_a = np.split(tensors[f"{at}gate_up_A"], 2)
    gate_b, up_b, down_a, down_b = (tensors[at + name] for name in ("gate_B", "up_B", "down_A", "down_B"))
    module = f"model.{at}".replace(".mlp.shared.", ".mlp.shared_experts.")
    if gate_b.ndim == 3:
        module += "experts."
        gate_a, up_a, down_b = gate_a[None], up_a[None], down_b[None]
    yield f"{module}gate_proj", gate_a, gate_b
    yield f"{module}up_proj", up_a, up_b
    yield f"{module}down_proj", down_a, down_b


def _each_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    """`_mlp_pairs` for experts that do not share the outer factors."""
    gate_a, up_a = np.split(tensors[f"{at}each_gate_up_A"], 2, axis=1)
    module = f"model.{at}experts."
    yield f"{module}gate_proj", gate_a, tensors[f"{at}gate_B"]
    yield f"{module}up_proj", up_a, tensors[f"{at}up_B"]
    yield f"{module}down_proj", tensors[f"{at}down_A"], tensors[f"{at}each_down_B"]


def _tinker_layout(pairs: list[tuple[str, Array, Array]]) -> dict[str, Array]:
    found = {}
    for module, a, b in pairs:
        before, _, last = module.rpartition(".")
        if a.ndim == 3:
            module = f"{before}.{_EXPERT_NAMES[last]}"
        elif module == "lm_head":
            module = "model.unembed_tokens"
        found[f"{_PREFIX}{module}.lora_A.weight"], found[f"{_PREFIX}{module}.lora_B.weight"] = a, b
    return found


def _peft_layout(pairs: list[tuple[str, Array, Array]]) -> dict[str, Array]:
    found = {}
    for module, a, b in pairs:
        if a.ndim == 2:
            found[f"{_PREFIX}{module}.lora_A.weight"], found[f"{_PREFIX}{module}.lora_B.weight"] = a, b
            continue
        before, _, last = module.rpartition(".")
        for e in range(max(len(a), len(b))):
            at = f"{_PREFIX}{before}.{e}.{last}"
            found[f"{at}.lora_A.weight"], found[f"{at}.lora_B.weight"] = a[e % len(a)], b[e % len(b)]
    return found


def _module_of(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2]


# ---- reading


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
    shared = all(_share(pairs) for (_, part), pairs in groups.items() if part == "mlp.experts")
    for (layer, part), pairs in groups.items():
        kind = max(_PARTS[part], key=lambda kind: len(pairs.keys() & set(kind.split())))
        if pairs.keys() != set(kind.split()):
            raise PeftFormatError(f"{layer}.{part}: has {', '.join(sorted(pairs))}, needs {kind}")
        if part == "self_attn":
            tensors.update(_attn(layer, pairs))
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
            tensors.update(_each(layer, pairs))
    return tensors


def _by_module(found: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    modules: dict[str, dict[str, Array]] = {}
    for key, tensor in found.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise PeftFormatError(f"tensor {key} is no LoRA factor")
        module = _SHORT.sub(lambda short: f"{short[1]}{_LONG_NAMES[short[2]]}", match["module"])
        module = module.replace(_MIXTRAL, ".mlp.").replace(_SEEING, "model.")
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


def _attn(layer: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    at, output = f"{layer}.attn.", pairs["o_proj"]
    found = {f"{at}o_A": output["A"], f"{at}o_B": output["B"]}
    if latent := pairs.get("kv_a_proj_with_mqa"):
        name = "q_a" if "q_a_proj" in pairs else "q"
        queries = pairs[f"{name}_proj"]
        found[f"{at}latent_A"] = _concatenate(layer, [queries["A"], latent["A"]])
        return found | {f"{at}{name}_B": queries["B"], f"{at}kv_a_B": latent["B"]}
    found |= {f"{at}qkv_A": _concatenate(layer, [pairs[f"{x}_proj"]["A"] for x in "qkv"])}
    return found | {f"{at}{x}_B": pairs[f"{x}_proj"]["B"] for x in "qkv"}


def _delta(layer: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    at, names = f"{layer}.attn.", next(names for names in _DELTA if f"in_proj_{names[0]}" in pairs)
    found = {f"{at}in_A": _concatenate(layer, [pairs[f"in_proj_{name}"]["A"] for name in names])}
    found |= {f"{at}{name}_B": pairs[f"in_proj_{name}"]["B"] for name in names}
    return found | {f"{at}out_{factor}": x for factor, x in pairs["out_proj"].items()}


def _mlp(at: str, pairs: Mapping[str, Mapping[str, Array]], *, experts: bool) -> dict[str, Array]:
    gate_a, up_a, down_b = (x[0] for x in _outer(pairs)) if experts else _outer(pairs)
    return _inner(at, pairs) | {f"{at}gate_up_A": _concatenate(at, [gate_a, up_a]), f"{at}down_B": down_b}


def _each(layer: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """`_mlp` for experts that do not share the outer factors."""
    at, experts = f"{layer}.mlp.", len(pairs["gate_proj"]["B"])
    gate_a, up_a, down_b = (_of_each(layer, x, experts) for x in _outer(pairs))
    joined = {f"{at}each_gate_up_A": _concatenate(layer, [gate_a, up_a], axis=1), f"{at}each_down_B": down_b}
    return _inner(at, pairs) | joined


def _inner(at: str, pairs: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    factors = {"gate_B": ("gate_proj", "B"), "up_B": ("up_proj", "B"), "down_A": ("down_proj", "A")}
    return {at + name: pairs[module][factor] for name, (module, factor) in factors.items()}


def _outer(pairs: Mapping[str, Mapping[str, Array]]) -> list[Array]:
    return [pairs[name][factor] for name, factor in _OUTER]


def _concatenate(layer: str, factors: list[Array], axis: int = 0) -> Array:
    try:
        return np.concatenate(factors, axis)
    except ValueError:
        raise PeftFormatError(f"{layer}: the lora_A of its projections differ in shape") from None


def _share(pairs: Mapping[str, Mapping[str, Array]]) -> bool:
    """Whether all experts have the same outer factors, of [1 or E, ..]."""
    found = [pair[factor] for name, factor in _OUTER for pair in [pairs.get(name, {})] if factor in pair]
    return all(x.ndim == 3 and all(row.tobytes() == x[0].tobytes() for row in x[1:]) for x in found)


def _of_each(layer: str, factor: Array, experts: int) -> Array:
    if factor.ndim != 3 or len(factor) not in (1, experts):
        raise PeftFormatError(f"{layer}: factors of {experts} experts are needed, one has shape {list(factor.shape)}")
    return np.array(np.broadcast_to(factor, (experts, *factor.shape[1:])))
