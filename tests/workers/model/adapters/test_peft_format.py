"""Exports: other tools compute from them what we do, and importing them again gives the same bits."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from weft.exports.folder import _FOR_PEFT

from tests.workers.model.models import ours, packed, random_adapter, reference
from workers.model.adapters.adapter import Adapter, AdapterFileError, load_adapter
from workers.model.adapters.peft_format import PeftFormatError, write_export
from workers.model.adapters.peft_reading import read_layout
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.lora.rows import LoraRows

LENGTHS = [7, 12]
RANK = 6  # not a power of two, so that alpha / rank is no exact float


def export(adapter: Adapter, folder: Path) -> Path:
    arrays = {name: view.numpy() for name, view in adapter.views.items()}
    said = {"base_model": "tiny", "rank": adapter.rank, "alpha": adapter.scale * adapter.rank}
    write_export(folder, arrays, **said, in_size=adapter.shape.in_size, mixtral=adapter.shape.mixtral)
    return folder


def our_logprobs(decoder: Decoder, adapter: Adapter) -> torch.Tensor:
    tokens, positions = packed(LENGTHS, decoder.config.vocab_size)
    lora = LoraRows([0, len(tokens)], [adapter], [None])
    with torch.no_grad():
        hidden = decoder(tokens, positions, PackedAttend(LENGTHS), lora)
        return torch.log_softmax(decoder.logits(hidden, lora), -1)


def their_logprobs(model: Any, decoder: Decoder) -> torch.Tensor:
    tokens, _ = packed(LENGTHS, decoder.config.vocab_size)
    with torch.no_grad():
        logits = torch.cat([model(part[None]).logits[0] for part in tokens.split(LENGTHS)])
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize(("family", "unembed"), [("qwen3", True), ("llama", True), ("qwen3-tied", False)])
def test_peft_computes_the_same_from_a_dense_export(family: str, unembed: bool, tmp_path: Path) -> None:
    model = reference(family)
    decoder = ours(model, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 1, scale=32 / RANK, train_unembed=unembed)
    folder = export(adapter, tmp_path / "export")
    theirs = PeftModel.from_pretrained(model, peft_folder(folder)).eval()
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4


BY_HAND = ["moe", "moe-mixed", "olmoe", "glm4-moe", "deepseek", "bailing", "qwen3.5", "nemotron-h", "nemotron-h-latent"]


@pytest.mark.parametrize("family", BY_HAND)
@pytest.mark.parametrize("layout", ["tinker", "peft"])
def test_merging_an_export_by_hand_gives_the_same_model(family: str, layout: str, tmp_path: Path) -> None:
    model = reference(family, **({"tie_word_embeddings": False} if family == "qwen3.5" else {}))
    decoder = ours(model, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 2, scale=32 / RANK)
    folder = export(adapter, tmp_path / "export")
    folder = peft_folder(folder) if layout == "peft" else folder
    factors, scale = load_file(folder / "adapter_model.safetensors"), 32 / RANK
    merged = load_file(tmp_path / "model" / "model.safetensors")
    used = set()
    for name in merged:
        row = 0  # the parts of a linear follow one another in its outputs
        for key, expert in keys_of(name.removesuffix(".weight"), layout):
            a, b = (factors.get(f"base_model.model.{key}.lora_{x}.weight") for x in "AB")
            if a is not None and b is not None:
                used.add(key)
                a, b = (x if x.ndim == 2 else x[expert % len(x)] for x in (a, b))
                merged[name][row : row + len(b)] += scale * (b @ a)
                row += len(b)
    assert len(used) * 2 == len(factors)
    assert our_logprobs(decoder, adapter).shape == (sum(LENGTHS), decoder.config.vocab_size)
    theirs = rebuilt(model, merged, tmp_path / "merged")
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4


def keys_of(module: str, layout: str) -> list[tuple[str, int]]:
    """The names of a module in a layout, as the cookbook maps them, each with the index of the expert. Mamba-2's
    `in_proj` and a delta rule's `in_proj_qkv` have a name for each part."""
    if layout == "peft":
        return [(module.replace("backbone.", "model."), 0)]
    if module.endswith("mixer.in_proj"):
        return [(module.replace("in_proj", part), 0) for part in ("gate_proj", "x_proj")]
    if module.endswith("in_proj_qkv"):
        return [(module.replace("in_proj_qkv", f"in_proj_{part}"), 0) for part in "qkv"]
    if ".experts." not in module:
        return [(module.replace("lm_head", "model.unembed_tokens"), 0)]
    before, expert, last = module.rsplit(".", 2)
    short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w1" if ".mixer." in module else "w3"}
    return [(f"{before}.{short[last]}", int(expert))]


def peft_folder(folder: Path) -> Path:
    return folder / "peft" if (folder / "peft").is_dir() else folder


def rebuilt(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> Any:
    model.save_pretrained(folder)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


FAMILIES_BACK = ["qwen3", "qwen3-tied", "moe", "moe-mixed", "mixtral", "glm4-moe", "deepseek", "qwen3-next"]
FAMILIES_BACK += ["bailing", "qwen3.5", "qwen3.5-moe", "nemotron-h", "nemotron-h-latent"]


@pytest.mark.parametrize("family", FAMILIES_BACK)
@pytest.mark.parametrize("targets", [{}, {"train_attn": False}, {"train_mlp": False, "train_unembed": False}])
def test_an_export_comes_back_bit_for_bit(family: str, targets: dict[str, bool], tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 3, scale=32 / RANK, **targets)
    folder = export(adapter, tmp_path / "export")
    for found in {folder, peft_folder(folder)}:
        loaded = load_adapter(found, decoder.config)
        assert torch.equal(loaded.adapter.flat, adapter.flat)
        assert (loaded.adapter.scale, loaded.base_model) == (adapter.scale, "tiny")
        assert loaded.adapter.shape == adapter.shape


def test_the_files_of_a_mixture_of_experts(tmp_path: Path) -> None:
    decoder = ours(reference("moe"), tmp_path / "model")
    folder = export(random_adapter(decoder, 4, 4), tmp_path / "export")
    peft = load_file(folder / "peft" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.1.mlp.experts.3"
    assert peft[f"{at}.gate_proj.lora_A.weight"].shape == (4, 64)
    assert peft[f"{at}.down_proj.lora_B.weight"].shape == (64, 4)
    assert all(x.ndim == 2 for x in peft.values())
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert (config["base_model_name_or_path"], type(config["lora_alpha"])) == ("tiny", int)
    projections = ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == projections
    tinker = load_file(folder / "adapter_model.safetensors")
    shapes = [tinker[f"base_model.model.model.layers.0.mlp.experts.{w}.lora_A.weight"].shape for w in ("w1", "w2")]
    assert shapes == [(1, 4, 64), (4, 4, 32)]
    again = export(random_adapter(decoder, 4, 4, scale=0.1), tmp_path / "again")
    assert json.loads((again / "adapter_config.json").read_text())["lora_alpha"] == 0.4


KEY = "base_model.model.model.layers.0.mlp.experts.{}.{}_proj.lora_{}.weight"


def pair(module: str, inputs: int = 8) -> dict[str, Any]:
    at = f"base_model.model.model.{module}.lora"
    return {f"{at}_A.weight": np.ones((2, inputs), np.float32), f"{at}_B.weight": np.ones((8, 2), np.float32)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({KEY.format(1, "gate", "A"): np.ones((3, 8), np.float32)}, "differ in shape"),
        ({KEY.format(0, "up", "B"): None}, "missing"),
        ({KEY.format(0, "down", "A"): None, KEY.format(1, "down", "A"): None}, "alone"),
        (pair("embed_tokens"), "embed_tokens is not one that can be trained here"),
        (
            pair("layers.0.self_attn.kv_b_proj"),
            "kv_b_proj is",
        ),  # latent attention: the product from latents to heads is frozen
        (pair("layers.0.self_attn.q_proj"), r"layers\.0\.self_attn: has q_proj, needs q_proj"),
        ({"model.layers.0.bias": np.ones(2, np.float32)}, "no LoRA factor"),
        (
            pair("layers.1.self_attn.q_proj", 9)
            | {key: x for part in "kvo" for key, x in pair(f"layers.1.self_attn.{part}_proj").items()},
            r"layers\.1\.attn\.: the lora_A of its projections differ in shape",
        ),
    ],
)
def test_adapters_of_another_kind_are_refused(change: dict[str, Any], says: str) -> None:
    read_layout(two_experts())
    found = {key: x for key, x in (two_experts() | change).items() if x is not None}
    with pytest.raises(PeftFormatError, match=says):
        read_layout(found)


def two_experts() -> dict[str, Any]:
    return {
        KEY.format(e, name, factor): np.full((2, 8) if factor == "A" else (8, 2), 0.5, np.float32)
        for e in (0, 1)
        for name in ("gate", "up", "down")
        for factor in "AB"
    }


def test_experts_that_share_some_outer_factors_and_not_others_keep_them_all() -> None:
    own = KEY.format(1, "down", "B")
    tensors = read_layout(two_experts() | {own: np.full((8, 2), 0.25, np.float32)})
    assert tensors["layers.0.mlp.each_gate_up_A"].shape == (2, 4, 8)
    assert [each.max() for each in tensors["layers.0.mlp.each_down_B"]] == [0.5, 0.25]


def in_tinkers_layout(outer: tuple[int, ...], *, last: float) -> dict[str, Any]:
    """Two experts; `outer` is the shape of the factor A of their inputs, `last` a number in the second's down_B."""
    at = "base_model.model.model.layers.0.mlp.experts"
    factors = [f"{at}.{w}.lora_{x}.weight" for w in ("w1", "w2", "w3") for x in "AB"]
    found = {key: np.ones((2, 2, 8) if "_A" in key else (2, 8, 2), np.float32) for key in factors}
    found[f"{at}.w1.lora_A.weight"] = np.ones(outer, np.float32)
    found[f"{at}.w2.lora_B.weight"][1] = last
    return found


@pytest.mark.parametrize(("outer", "last"), [((3, 2, 8), 2), ((2, 8), 1)])
def test_outer_factors_of_another_number_of_experts_are_refused(outer: tuple[int, ...], last: float) -> None:
    says = rf"layers\.0\.mlp\.: factors of 2 experts are needed, one has shape {re.escape(str(list(outer)))}"
    with pytest.raises(PeftFormatError, match=says):
        read_layout(in_tinkers_layout(outer, last=last))
    assert read_layout(in_tinkers_layout((1, 2, 8), last=2))["layers.0.mlp.each_gate_up_A"].shape == (2, 4, 8)


def test_experts_that_share_nothing_keep_their_own_factors(tmp_path: Path) -> None:
    """Other tools train them so; layers whose factors happen to agree are no exception."""
    decoder = ours(reference("moe"), tmp_path / "model")
    adapter = random_adapter(decoder, 4, 6, shared=False)
    adapter.view("layers.0.mlp.each_gate_up_A").zero_()
    adapter.view("layers.0.mlp.each_down_B").zero_()
    folder = export(adapter, tmp_path / "export")
    for found in {folder, peft_folder(folder)}:
        loaded = load_adapter(found, decoder.config).adapter
        assert not loaded.shape.shared
        assert torch.equal(loaded.flat, adapter.flat)


def test_an_adapter_with_either_names_of_mixtrals_experts_is_read(tmp_path: Path) -> None:
    """Exports have its checkpoints' names, which PEFT and vLLM know; older exports have those of transformers 5."""
    decoder = ours(reference("mixtral"), tmp_path / "model")
    adapter = random_adapter(decoder, 4, 6)
    folder = peft_folder(export(adapter, tmp_path / "export"))
    file, names = folder / "adapter_model.safetensors", {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    found = load_file(file)
    assert "base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_A.weight" in found
    assert names.keys() & set(json.loads((folder / "adapter_config.json").read_text())["target_modules"]) == set()
    assert torch.equal(load_adapter(folder, decoder.config).adapter.flat, adapter.flat)
    renamed = {}
    for key, factor in found.items():
        for long, short in names.items():
            key = key.replace(f".{short}.", f".{long}.")
        renamed[key.replace(".block_sparse_moe.", ".mlp.")] = factor
    assert "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_A.weight" in renamed
    save_file(renamed, file)
    assert torch.equal(load_adapter(folder, decoder.config).adapter.flat, adapter.flat)


@pytest.mark.parametrize("family", ["qwen3-tied", "llama-tied", "qwen2"])
def test_merging_by_the_downloads_readme_gives_the_same_model_with_a_tied_unembedding(
    family: str, tmp_path: Path
) -> None:
    """The README unties it first; otherwise merging would change the embedding too."""
    base = reference(family)
    decoder = ours(base, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 4)
    folder = export(adapter, tmp_path / "export")
    steps = textwrap.dedent(_FOR_PEFT.partition("Part them before PeftModel.from_pretrained:\n\n")[2])
    assert steps
    exec(steps, {"base": base, "torch": torch})
    merged = PeftModel.from_pretrained(base, peft_folder(folder)).merge_and_unload()
    torch.testing.assert_close(their_logprobs(merged, decoder), our_logprobs(decoder, adapter), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["moe", "mixtral", "olmoe"])
def test_stock_peft_reads_an_export_with_experts_whole(family: str, tmp_path: Path) -> None:
    """Families whose MLPs are experts alone."""
    model = reference(family)
    decoder = ours(model, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 4)
    folder = peft_folder(export(adapter, tmp_path / "export"))
    theirs = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "model"), folder).eval()
    torch.testing.assert_close(their_logprobs(theirs, decoder), our_logprobs(decoder, adapter), atol=1e-4, rtol=0)


@pytest.mark.parametrize("trained", [{}, {"train_attn": False}], ids=["all", "no attention"])
@pytest.mark.parametrize(
    ("family", "experts"),
    [
        *((family, True) for family in ("qwen3.5-moe", "gpt-oss", "nemotron-h", "nemotron-h-latent")),
        *((family, False) for family in ("glm4-moe", "glm4-moe-lite", "deepseek", "qwen3-next")),
    ],
)
def test_stock_peft_drops_what_a_downloads_readme_says_and_nothing_else(
    family: str, experts: bool, trained: dict[str, bool], tmp_path: Path
) -> None:
    """It drops the experts, or else the dense layers and shared experts beside them."""
    base = reference(family)
    decoder = ours(base, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 4, **trained)
    folder = peft_folder(export(adapter, tmp_path / "export"))
    if family.startswith("nemotron"):
        line = _FOR_PEFT.partition('(and "nemotron_h" again after it):\n\n')[2].partition("\n")[0]
        exec(line.strip(), {"base": base})
        assert base.config.model_type != "nemotron_h"
    theirs = their_logprobs(PeftModel.from_pretrained(base, folder).eval(), decoder)
    assert (theirs - our_logprobs(decoder, adapter)).abs().max() > 0.1
    for name, factor in adapter.views.items():
        layer = re.search(r"layers\.(\d+)\..*mlp\.(shared|latent)?.*_B$", name)
        if layer and experts == (decoder.config.is_moe(int(layer[1])) and not layer[2]):
            factor.zero_()
    torch.testing.assert_close(theirs, our_logprobs(decoder, adapter), atol=1e-4, rtol=0)


def test_an_archive_of_gpt_oss_that_tinker_made_is_read(tmp_path: Path) -> None:
    decoder = ours(reference("gpt-oss"), tmp_path / "model")
    adapter = random_adapter(decoder, 4, 6)
    file = export(adapter, tmp_path / "export") / "adapter_model.safetensors"
    renamed = {key.replace(".self_attn.", ".attn."): factor for key, factor in load_file(file).items()}
    assert "base_model.model.model.layers.0.attn.q_proj.lora_A.weight" in renamed
    save_file(renamed, file)
    assert torch.equal(load_adapter(file.parent, decoder.config).adapter.flat, adapter.flat)


@pytest.mark.parametrize(
    ("family", "root"), [("qwen3.5", "model.language_model"), ("deepseek", "language_model.model")]
)
def test_an_adapter_with_the_names_of_a_model_that_sees_is_read(family: str, root: str, tmp_path: Path) -> None:
    adapter = random_adapter(ours(reference(family), tmp_path / "model"), 2, 1, train_mlp=False, train_unembed=False)
    tensors = {name: view.numpy() for name, view in adapter.views.items()}
    write_export(tmp_path, tensors, base_model="tiny", rank=2, alpha=4.0)
    plain = load_file(tmp_path / "adapter_model.safetensors")
    seeing = {name.replace(".model.layers.", f".{root}.layers."): x for name, x in plain.items()}
    assert not plain.keys() & seeing.keys()
    found = read_layout({name: x.numpy() for name, x in seeing.items()})
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_the_head_of_kimi_k2_5_is_found_within_its_text_model(tmp_path: Path) -> None:
    adapter = random_adapter(ours(reference("deepseek"), tmp_path / "model"), 2, 1, train_mlp=False)
    tensors = {name: view.numpy() for name, view in adapter.views.items()}
    write_export(tmp_path, tensors, base_model="tiny", rank=2, alpha=4.0)
    plain = load_file(tmp_path / "adapter_model.safetensors")
    head = re.compile(r"\.(model\.unembed_tokens|lm_head)\.")
    seeing = {head.sub(".language_model.lm_head.", name): x.numpy() for name, x in plain.items()}
    assert len(plain.keys() - seeing.keys()) == 2
    found = read_layout(seeing)
    for name in ("unembed_A", "unembed_B"):
        assert np.array_equal(found[name], tensors[name])


def test_tinkers_placeholder_of_a_product_that_experts_lack_is_left_out(tmp_path: Path) -> None:
    decoder = ours(reference("nemotron-h"), tmp_path / "model")
    adapter = random_adapter(decoder, 4, 6)
    file = export(adapter, tmp_path / "export") / "adapter_model.safetensors"
    tensors = load_file(file)
    at = "base_model.model.backbone.layers.1.mixer.experts"
    assert f"{at}.w1.lora_B.weight" in tensors
    save_file(tensors | {f"{at}.w3.lora_{factor}.weight": torch.empty(0) for factor in "AB"}, file)
    assert torch.equal(load_adapter(file.parent, decoder.config).adapter.flat, adapter.flat)


def test_an_export_of_another_model_is_refused(tmp_path: Path) -> None:
    small = ours(reference("moe"), tmp_path / "small")
    large = ours(reference("moe", num_experts=8), tmp_path / "large")
    folder = export(random_adapter(small, 4, 5), tmp_path / "export")
    with pytest.raises(AdapterFileError, match="the model needs"):
        load_adapter(folder, large.config)
    file = folder / "adapter_model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if ".layers.1.self_attn." not in key}, file)
    with pytest.raises(AdapterFileError, match=r"missing tensors \['layers\.1\.attn\."):
        load_adapter(folder, small.config)
