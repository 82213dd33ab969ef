"""Adapters as other tools read them: adapter_model.safetensors with an adapter_config.json. No torch, so that the API
can write one too.

Two layouts say the same thing, and differ only for experts, for the unembedding (r rank, E experts), in Qwen3.5 and in
Nemotron:

| | PEFT, vLLM | Tinker, its cookbook |
|---|---|---|
| experts | `mlp.experts.{e}.gate_proj` A [r,d], 2-D for each | `mlp.experts.w1` A [1 or E,r,d]; w2 is down, w3 up |
| Mixtral's experts | `block_sparse_moe.experts.{e}.w1`; w2 is down, w3 up | as all experts |
| experts without a gate | `mixer.experts.{e}.up_proj` | `mixer.experts.w1`; w2 is down, w3 empty or not there |
| `in_proj_qkv` | A [3r,d], B [out,3r]: of queries, of keys, of values; else 0 | `in_proj_q`, `in_proj_k`, `in_proj_v` |
| Mamba-2's `in_proj` | A [2r,d], B [out,2r]: of the gate, of the values; else 0 | `mixer.gate_proj`, `mixer.x_proj` |
| Nemotron's modules | `model.layers` | `backbone.layers` |
| unembedding | `lm_head` | `model.unembed_tokens` |

An export has Tinker's layout in its root, because every Tinker tool reads the root, and PEFT's in `peft/` where the two
differ. Weft shares the hidden-side factor of experts among them: Tinker's layout keeps it
once, PEFT's repeats it for every expert. Reading takes either and gives back exactly the same bits. Where experts do
not share it, because another tool trained it, each keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from workers.model.adapters.writing import writing

Array = NDArray[np.float32]

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_FOLDER = "peft"

_PREFIX = "base_model.model."
#: Tinker's names of an expert's products, with a gate and without.
_GATED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_UNGATED = {"up_proj": "w1", "down_proj": "w2"}
_OF_EXPERT = re.compile(r"\.mlp(\.experts\.\d+\.)(\w+_proj)")
#: A part of the names of Nemotron's modules.
MIXER = ".mixer."
#: The projections into a gated delta rule, in the order in which they are fused: in Qwen3-Next; in Qwen3.5 as Tinker
#: trains it; and as stock PEFT does.
DELTA = (("qkvz", "ba"), ("q", "k", "v", "z"), ("qkv", "z", "b", "a"))
#: Linears whose parts have a pair of factors each, and those parts in order: of a gated delta rule, and of Mamba-2.
PARTED = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
}


class PeftFormatError(ValueError):
    """Tensors that are not an adapter of the kind Weft trains; the message names one."""


def write_export(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    base_model: str,
    rank: int,
    alpha: float,
    in_size: int = 0,
    mixtral: bool = False,
) -> None:
    """Write `tensors` (by their names in `AdapterShape`) as an export into `folder`. `in_size`: the outputs of the
    model's Mamba-2's `in_proj` (`DecoderConfig.mamba`), of which an adapter has a part. `mixtral`: PEFT finds the
    experts by the names of Mixtral's checkpoints alone, and drops all others without a word."""
    pairs = list(_pairs(tensors))
    root, peft = _tinker_layout(pairs), _peft_layout(_fused(pairs, in_size))
    if mixtral:
        peft = {_as_mixtrals(key): x for key, x in peft.items()}
    same = root.keys() == peft.keys()
    modules = sorted({_module_of(key) for key in root})
    _write(folder, root, _config(base_model, rank, alpha, modules))
    if not same:
        modules = sorted({_module_of(key) for key in peft})
        _write(folder / PEFT_FOLDER, peft, _config(base_model, rank, alpha, modules, _other_ranks(peft, rank)))


def write_peft(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    base_model: str,
    rank: int,
    alpha: float,
    named: Callable[[str], str] = str,
) -> list[str]:
    """Write `tensors` in PEFT's layout alone, under names that `named` makes of its own. Returns the names of the
    modules it has factors for."""
    layout = {named(key): x for key, x in _peft_layout(_fused(list(_pairs(tensors)), 0)).items()}
    modules = sorted({_module_of(key) for key in layout})
    _write(folder, layout, _config(base_model, rank, alpha, modules, _other_ranks(layout, rank)))
    return modules


def _other_ranks(peft: Mapping[str, Array], rank: int) -> dict[str, int]:
    """The ranks of the modules whose rank is not the adapter's (those in PARTED), by module name."""
    ranks = {_module_of(key): len(x) for key, x in peft.items() if key.endswith(".lora_A.weight")}
    return {name: own for name, own in ranks.items() if own != rank}


def _write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with writing():
        save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _config(
    base_model: str, rank: int, alpha: float, modules: list[str], ranks: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """`ranks` of modules that have another; their scale is the same."""
    whole = round(alpha)
    patterns = {
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": {name: alpha * own / rank for name, own in (ranks or {}).items()},
    }
    return {
        **(patterns if ranks else {}),
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
    """(transformers' name of the module, A, B); 3-D for experts, [1, ...] if they share the factor."""
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
            module = _module(at, "self_attn")
            for part, part_a in zip("qkv", np.split(a, 3), strict=True):
                yield f"{module}{part}_proj", part_a, tensors[f"{at}{part}_B"]
            yield f"{module}o_proj", tensors[f"{at}o_A"], tensors[f"{at}o_B"]
        elif name.endswith(".attn.latent_A"):
            yield from _latent_pairs(name.removesuffix("latent_A"), tensors)
        elif name.endswith(".mixer.attn.in_A"):
            yield from _mamba_pairs(name.removesuffix("in_A"), tensors)
        elif name.endswith(".mixer.attn.whole_in_A"):
            at = name.removesuffix("whole_in_A")
            yield f"{_module(at, '')}in_proj", a, tensors[f"{at}whole_in_B"]
            out_a, out_b = tensors[f"{at}out_A"], tensors[f"{at}out_B"]
            if out_a.any() or out_b.any():  # stock PEFT has no factors there (peft_reading.py)
                yield f"{_module(at, '')}out_proj", out_a, out_b
        elif name.endswith((".attn.in_A", ".attn.whole_in_A")):
            yield from _delta_pairs(name.removesuffix("in_A"), tensors)
        elif found := _OF_MLP.fullmatch(name):
            yield from (_each_pairs if found["each"] else _mlp_pairs)(found["at"], tensors)
        elif name.endswith(".mlp.latent_in_A"):
            at = name.removesuffix("latent_in_A")
            yield f"{_module(at, '')}fc1_latent_proj", a, tensors[f"{at}latent_in_B"]
            yield f"{_module(at, '')}fc2_latent_proj", tensors[f"{at}latent_out_A"], tensors[f"{at}latent_out_B"]


#: The factor of an MLP's input: of gate and up, or of up alone.
_OF_MLP = re.compile(r"(?P<at>.+\.mlp\.(?:shared\.|shared_expert\.)?)(?P<each>each_)?(?:gate_)?up_A")


def _module(at: str, kind: str) -> str:
    """The prefix of modules' names whose tensors' names begin with `at`; `kind` is the family's word for it, except
    where a layer is only one thing."""
    layer = at.removesuffix("attn.").removesuffix("mlp.")
    return f"model.{layer}" if layer.endswith(MIXER) else f"model.{layer}{kind}."


def _mamba_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    gate_a, x_a = np.split(tensors[f"{at}in_A"], 2)
    yield f"{_module(at, '')}gate_proj", gate_a, tensors[f"{at}gate_B"]
    yield f"{_module(at, '')}x_proj", x_a, tensors[f"{at}x_B"]
    yield f"{_module(at, '')}out_proj", tensors[f"{at}out_A"], tensors[f"{at}out_B"]


def _fused(pairs: Sequence[tuple[str, Array, Array]], in_size: int) -> Iterator[tuple[str, Array, Array]]:
    """The same, with one pair of a multiple of the rank in place of those of the parts of a linear (PARTED): the first
    outputs are of the first part, and so on, and those beyond (of Mamba-2) have no adapter."""
    found = {module: (a, b) for module, a, b in pairs}
    whole_of = {part: (whole, parts) for whole, parts in PARTED.items() for part in parts}
    for module, (a, b) in found.items():
        at, _, name = module.rpartition(".")
        whole, parts = whole_of.get(name, ("", ()))
        if not parts or not all(f"{at}.{part}" in found for part in parts):
            yield module, a, b
        elif name == parts[0]:
            stacked, factors = zip(*(found[f"{at}.{part}"] for part in parts), strict=True)
            rows = sum(len(factor) for factor in factors)
            if whole == "in_proj" and in_size < rows:
                raise PeftFormatError(f"{at}.in_proj: has {in_size} outputs, of which {rows} have an adapter")
            yield f"{at}.{whole}", np.concatenate(stacked), _diagonal(factors, max(rows, in_size))


def _diagonal(factors: Sequence[Array], rows: int) -> Array:
    """[rows, all ranks together], with `factors` as blocks on the diagonal."""
    whole = np.zeros((rows, sum(factor.shape[1] for factor in factors)), factors[0].dtype)
    row = column = 0
    for factor in factors:
        whole[row : row + len(factor), column : column + factor.shape[1]] = factor
        row, column = row + len(factor), column + factor.shape[1]
    return whole


def _delta_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    """`at` is what the names of the factors of the input begin with."""
    layer, _, own = at.partition("attn.")
    module = f"model.{layer}linear_attn."
    names = next(names for names in DELTA if f"{at}{names[0]}_B" in tensors)
    for name, a in zip(names, np.split(tensors[f"{at}in_A"], len(names)), strict=True):
        b = tensors[f"{at}{name}_B"]
        if not own or name in ("qkv", "z") or a.any() or b.any():  # there may be none of the others (peft_reading.py)
            yield f"{module}in_proj_{name}", a, b
    yield f"{module}out_proj", tensors[f"{layer}attn.out_A"], tensors[f"{layer}attn.out_B"]


def _latent_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    module, queries = f"model.{at.removesuffix('attn.')}self_attn.", "q_a" if f"{at}q_a_B" in tensors else "q"
    queries_a, latent_a = np.split(tensors[f"{at}latent_A"], 2)
    yield f"{module}{queries}_proj", queries_a, tensors[f"{at}{queries}_B"]
    yield f"{module}kv_a_proj_with_mqa", latent_a, tensors[f"{at}kv_a_B"]
    yield f"{module}o_proj", tensors[f"{at}o_A"], tensors[f"{at}o_B"]


def _mlp_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    parts = _parts(at, tensors)
    down_a, down_b = tensors[f"{at}down_A"], tensors[f"{at}down_B"]
    module = f"model.{at}".replace(".mlp.shared.", ".mlp.shared_experts.").replace(f"{MIXER}mlp.", MIXER)
    experts = down_a.ndim == 3
    module += "experts." if experts else ""
    for part, a in zip(parts, np.split(tensors[f"{at}{'_'.join(parts)}_A"], len(parts)), strict=True):
        yield f"{module}{part}_proj", a[None] if experts else a, tensors[f"{at}{part}_B"]
    yield f"{module}down_proj", down_a, down_b[None] if experts else down_b


def _each_pairs(at: str, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    """`_mlp_pairs` for experts that do not share the outer factors."""
    parts = _parts(at, tensors)
    module = f"model.{at}experts.".replace(f"{MIXER}mlp.", MIXER)
    each = np.split(tensors[f"{at}each_{'_'.join(parts)}_A"], len(parts), axis=1)
    for part, a in zip(parts, each, strict=True):
        yield f"{module}{part}_proj", a, tensors[f"{at}{part}_B"]
    yield f"{module}down_proj", tensors[f"{at}down_A"], tensors[f"{at}each_down_B"]


def _parts(at: str, tensors: Mapping[str, Array]) -> list[str]:
    """The factors of an MLP's input: gate and up, or up alone."""
    return [part for part in ("gate", "up") if f"{at}{part}_B" in tensors]


def _tinker_layout(pairs: list[tuple[str, Array, Array]]) -> dict[str, Array]:
    found = {}
    for module, a, b in pairs:
        before, _, last = module.rpartition(".")
        if a.ndim == 3:
            module = f"{before}.{short_names(module)[last]}"
        elif module == "lm_head":
            module = "model.unembed_tokens"
        if MIXER in module:
            module = module.replace("model.", "backbone.", 1)
        found[f"{_PREFIX}{module}.lora_A.weight"], found[f"{_PREFIX}{module}.lora_B.weight"] = a, b
    return found


def short_names(module: str) -> dict[str, str]:
    return _UNGATED if MIXER in module else _GATED


def _peft_layout(pairs: Iterable[tuple[str, Array, Array]]) -> dict[str, Array]:
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


def _as_mixtrals(key: str) -> str:
    return _OF_EXPERT.sub(lambda at: f".block_sparse_moe{at[1]}{_GATED[at[2]]}", key)


def _module_of(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2]
