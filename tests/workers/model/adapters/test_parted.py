"""Linears whose parts have a pair of factors each, as Tinker trains them: Mamba-2's `in_proj`, Qwen3.5's
`in_proj_qkv`. They are imported and exported in both layouts, and so is the one pair that stock PEFT trains instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from weft.exports.folder import finish

from tests.workers.model.adapters.test_peft_format import (
    LENGTHS,
    RANK,
    export,
    our_logprobs,
    peft_folder,
    their_logprobs,
)
from tests.workers.model.models import ours, packed, random_adapter, reference
from workers.model.adapters.adapter import load_adapter
from workers.model.adapters.imported import CannotImport, read_adapter
from workers.model.adapters.peft_format import PeftFormatError, write_export

STOCK = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj"]


def test_what_stock_peft_trains_of_nemotron_comes_and_goes(tmp_path: Path) -> None:
    """PEFT trains one pair for the whole of `in_proj`, and none for `out_proj`, which it refuses."""
    decoder = ours(reference("nemotron-h"), tmp_path / "model")
    config = LoraConfig(r=3, lora_alpha=6, target_modules=STOCK, init_lora_weights=False)
    theirs = get_peft_model(reference("nemotron-h"), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    read_adapter(tmp_path / "theirs", decoder.config).write(tmp_path / "ours", "tiny")
    adapter = load_adapter(tmp_path / "ours", decoder.config).adapter
    assert (adapter.shape.whole, adapter.scale) == (True, 2.0)
    wanted = their_logprobs(theirs, decoder)
    assert (wanted - our_logprobs(decoder, adapter)).abs().max() < 1e-4
    folder = peft_folder(export(adapter, tmp_path / "export"))
    before, after = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "theirs", folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[key]) for key, x in before.items())
    back = PeftModel.from_pretrained(reference("nemotron-h"), folder).eval()
    torch.testing.assert_close(their_logprobs(back, decoder), wanted, atol=0, rtol=0)


def test_in_proj_of_nemotron_has_twice_the_rank_for_its_two_parts(tmp_path: Path) -> None:
    decoder = ours(reference("nemotron-h"), tmp_path / "model")
    adapter = random_adapter(decoder, 4, 6)
    folder = peft_folder(export(adapter, tmp_path / "export"))
    arrays = {name: view.numpy() for name, view in adapter.views.items()}
    with pytest.raises(PeftFormatError, match=r"mixer\.in_proj: has 9 outputs, of which \d+ have an adapter"):
        write_export(tmp_path / "other", arrays, base_model="tiny", rank=4, alpha=8, in_size=9)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"in_proj": 8}, {"in_proj": 16})
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mixer.in_proj.lora_B.weight"
    assert tensors[key].shape == (6 * 16 + (6 * 16 + 2 * 2 * 24) + 6, 8)
    assert not read_adapter(folder, decoder.config).shape.whole
    tensors[key][-1, 0] = 1.0  # a row of the steps
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CannotImport, match="in_proj: of another rank, it must be of 2 parts with 4 columns each alone"):
        read_adapter(folder, decoder.config)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 8}}))
    with pytest.raises(CannotImport, match=r"rank_pattern is \{'q_proj': 8\}; only in_proj"):
        read_adapter(folder, decoder.config)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {}}))  # half the scale
    with pytest.raises(CannotImport, match=r"alpha_pattern is \{\}; only in_proj"):
        read_adapter(folder, decoder.config)


#: Names and shapes in an archive of Tinker's, as its cookbook merges them (weights/_merge_qwen3_5.py): layer 0 is a
#: delta rule with 2 key heads of 16, 4 value heads of 24 and a hidden size of 64; layer 1 is attention.
QWEN3_5_ARCHIVE = {
    "model.layers.0.linear_attn.in_proj_q": (32, 64),
    "model.layers.0.linear_attn.in_proj_k": (32, 64),
    "model.layers.0.linear_attn.in_proj_v": (96, 64),
    "model.layers.0.linear_attn.in_proj_z": (96, 64),
    "model.layers.0.linear_attn.out_proj": (64, 96),
    "model.layers.1.self_attn.q_proj": (256, 64),
    "model.layers.1.self_attn.k_proj": (64, 64),
    "model.layers.1.self_attn.v_proj": (64, 64),
    "model.layers.1.self_attn.o_proj": (64, 128),
    "model.unembed_tokens": (96, 64),
}


def test_an_archive_of_qwen3_5_that_tinker_made_is_imported(tmp_path: Path) -> None:
    model = reference("qwen3.5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    decoder = ours(model, tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    archive, weights = tmp_path / "archive", dict(model.named_parameters())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied
    factors, products = {}, {}
    for name, (rows, columns) in QWEN3_5_ARCHIVE.items():
        a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((4, columns), (rows, 4)))
        factors |= {f"base_model.model.{name}.lora_{x}.weight": factor for x, factor in (("A", a), ("B", b))}
        products[name.replace("model.unembed_tokens", "lm_head")] = 2.0 * (b @ a)
    at = "model.layers.0.linear_attn.in_proj_"
    products[f"{at}qkv"] = torch.cat([products.pop(f"{at}{part}") for part in "qkv"])
    changed = {f"{name}.weight": weights[f"{name}.weight"] + product for name, product in products.items()}
    archive.mkdir()
    save_file(factors, archive / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3.5-4B", "r": 4, "lora_alpha": 8}
    (archive / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "ours").mkdir()
    read_adapter(archive, decoder.config).write(tmp_path / "ours", "tiny")
    adapter = load_adapter(tmp_path / "ours", decoder.config).adapter
    tokens, _ = packed(LENGTHS, decoder.config.vocab_size)
    with torch.no_grad():
        logits = [
            torch.func.functional_call(model, changed, (part[None],), tie_weights=False).logits[0]
            for part in tokens.split(LENGTHS)
        ]
    wanted = torch.log_softmax(torch.cat(logits), -1)
    assert (our_logprobs(decoder, adapter) - wanted).abs().max() < 1e-4
    back = load_file(export(adapter, tmp_path / "export") / "adapter_model.safetensors")
    assert back.keys() == factors.keys()
    assert all(torch.equal(factor, back[key]) for key, factor in factors.items())


@pytest.mark.parametrize("also", [[], ["in_proj_b", "in_proj_a"]], ids=["usual", "all four"])
def test_what_stock_peft_trains_of_a_delta_rule_comes_and_goes(also: list[str], tmp_path: Path) -> None:
    """PEFT trains one pair of the usual rank for the whole of `in_proj_qkv`; also beside experts that share factors."""
    decoder = ours(reference("qwen3.5-moe"), tmp_path / "model")
    modules = [*STOCK[1:], "in_proj_qkv", "in_proj_z", "out_proj", *also]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=modules, init_lora_weights=False)
    theirs = get_peft_model(reference("qwen3.5-moe"), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    read_adapter(tmp_path / "theirs", decoder.config).write(tmp_path / "ours", "tiny")
    adapter = load_adapter(tmp_path / "ours", decoder.config).adapter
    assert adapter.shape.whole
    assert adapter.shape.shared
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4
    folder = peft_folder(export(adapter, tmp_path / "export"))
    before, after = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "theirs", folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[key]) for key, x in before.items())


def test_in_proj_qkv_of_a_delta_rule_has_three_times_the_rank_for_its_three_parts(tmp_path: Path) -> None:
    decoder = ours(reference("qwen3.5"), tmp_path / "model")
    folder = peft_folder(export(random_adapter(decoder, 4, 6, train_unembed=False), tmp_path / "export"))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"in_proj_qkv": 12}, {"in_proj_qkv": 24})
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_B.weight"
    assert tensors[key].shape == (2 * 32 + 96, 12)
    tensors[key][-1, 0] = 1.0  # from a factor of the queries to the values
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(
        CannotImport, match="in_proj_qkv: of another rank, it must be of 3 parts with 4 columns each alone"
    ):
        read_adapter(folder, decoder.config)


def test_a_folder_for_vllm_has_one_scale_and_names_the_largest_rank(tmp_path: Path) -> None:
    model = reference("qwen3.5")
    decoder = ours(model, tmp_path / "model")
    adapter = random_adapter(decoder, RANK, 6, scale=0.37, train_unembed=False)
    folder = tmp_path / "fetched"
    finish(peft_folder(export(adapter, tmp_path / "export")), folder, "tinker://run/w", "vllm", False)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["alpha_pattern"]) == (RANK, {"in_proj_qkv": 3 * RANK})
    assert "--max-lora-rank 32 " in (folder / "README.md").read_text()  # room for 18
    theirs = PeftModel.from_pretrained(model, folder).eval()
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4
