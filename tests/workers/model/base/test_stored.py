"""Quantised checkpoints load to the tensors that transformers and the formula give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.workers.model.models import ours, reference
from workers.model.base.stored import Stored, from_fp8, from_mxfp4
from workers.model.base.weights import ModelWeightsError, load_decoder
from workers.model.config import UnsupportedModel


def packed(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 weights of experts [E, O, I]: any byte may occur, and scales go from 2^-6 to 2^1."""
    generator = torch.Generator().manual_seed(seed)
    experts, out, inner = shape
    blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 129, (experts, out, inner // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    blocks, scales = packed(3, 20, 96, seed=0)
    assert torch.equal(from_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_fp8_is_each_block_times_its_scale() -> None:
    """Blocks at the edges may be smaller."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) + 0.5
    wanted = weight.float() * torch.kron(scales, torch.ones(128, 128))[:200, :300]
    assert torch.equal(from_fp8(weight, scales), wanted.to(torch.bfloat16))


def test_a_checkpoint_of_mxfp4_loads_as_the_same_one_dequantised(tmp_path: Path) -> None:
    """In shards that separate blocks from their scales."""
    model, plain = reference("gpt-oss"), tmp_path / "plain"
    ours(model, plain)
    tensors = load_file(plain / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors[name].shape
        quantised[name + "_blocks"], quantised[name + "_scales"] = both = packed(experts, out, inner, seed=len(name))
        tensors[name] = convert_moe_packed_tensors(*both).contiguous()
    save_file(tensors, plain / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name + "_blocks" not in quantised}
    scales = {name: quantised.pop(name) for name in list(quantised) if name.endswith("_scales")}
    folder = sharded(tmp_path / "mxfp4", plain, {"quant_method": "mxfp4"}, [quantised, rest | scales])
    equal(load_decoder(plain), load_decoder(folder))
    rows_are_those_of_the_whole(folder)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("moe-wide", torch.float8_e4m3fn),
        ("qwen3", torch.float8_e4m3fn),
        ("qwen3", torch.float8_e5m2),
        ("deepseek", torch.float8_e4m3fn),
    ],
)
def test_a_checkpoint_of_block_fp8_loads_as_the_same_one_dequantised(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, plain = reference(family), tmp_path / "plain"
    ours(model, plain)
    tensors = load_file(plain / "model.safetensors")
    scales: dict[str, Tensor] = {}
    stored = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "_mqa.weight")):
            rows, columns = (-(-size // 128) for size in weight.shape)
            scales[name + "_scale_inv"] = scale = torch.rand(rows, columns) + 0.01
            stored[name] = weight.to(dtype)
            each = torch.kron(scale, torch.ones(128, 128))[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (stored[name].float() * each).to(torch.bfloat16)
    save_file(tensors, plain / "model.safetensors")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = sharded(tmp_path / "fp8", plain, method, [stored, scales])
    equal(load_decoder(plain), load_decoder(folder))
    rows_are_those_of_the_whole(folder)
    missing = sharded(tmp_path / "bad", plain, method, [stored])
    with pytest.raises(ModelWeightsError, match=r"_(proj|with_mqa)\.weight_scale_inv is missing"):
        load_decoder(missing)


def rows_are_those_of_the_whole(folder: Path) -> None:
    """Any rows that are read are those of the whole tensor, also if they begin or end within a block."""
    stored = Stored(sorted(folder.glob("*.safetensors")))
    for name in stored.names():
        whole = stored.read(name)
        assert stored.shape(name) == tuple(whole.shape)
        for begin, end in ((0, 1), (len(whole) // 3, 2 * len(whole) // 3 + 1), (len(whole) - 1, len(whole))):
            assert torch.equal(stored.rows(name, begin, end), whole[begin:end]), name


def test_a_checkpoint_of_int4_loads_as_the_same_one_dequantised(tmp_path: Path) -> None:
    """As in Kimi-K2-Thinking: experts of four bits in groups of 32, the rest in bfloat16. Also wrapped as Kimi-K2.5."""
    model, plain = reference("deepseek", moe_intermediate_size=48), tmp_path / "plain"  # the last group is smaller
    ours(model, plain)
    tensors = load_file(plain / "model.safetensors")
    packed_parts: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if ".experts." not in name:
            rest[name] = weight
            continue
        rows, columns = weight.shape
        numbers = torch.randint(-8, 8, weight.shape, generator=generator)
        scales = (torch.rand(rows, -(-columns // 32), generator=generator) + 0.01).to(torch.bfloat16)
        words = sum((numbers + 8)[:, place::8] << 4 * place for place in range(8))
        assert isinstance(words, Tensor)
        packed_parts[name + "_packed"] = (words - (words >> 31 << 32)).to(torch.int32)
        packed_parts[name + "_scale"], rest[name + "_shape"] = scales, torch.tensor([rows, columns])
        each = scales.float().repeat_interleave(32, 1)[:, :columns]
        tensors[name] = (numbers * each).to(torch.bfloat16)
    save_file(tensors, plain / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    group = {"weights": weights, "input_activations": None, "output_activations": None, "targets": ["Linear"]}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    equal(load_decoder(plain), load_decoder(sharded(tmp_path / "int4", plain, method, [packed_parts, rest])))
    rows_are_those_of_the_whole(tmp_path / "int4")
    equal(load_decoder(plain), load_decoder(seeing(tmp_path / "seeing", plain, method, [packed_parts, rest])))
    weights["num_bits"] = 8
    with pytest.raises(UnsupportedModel, match=r"compressed-tensors\) with num_bits=8"):
        load_decoder(sharded(tmp_path / "int8", plain, method, [packed_parts, rest]))


def sharded(folder: Path, source: Path, method: dict[str, object], parts: list[dict[str, Tensor]]) -> Path:
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for number, part in enumerate(parts):
        save_file(part, folder / f"{number}.safetensors")
        where.update(dict.fromkeys(part, f"{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def seeing(folder: Path, source: Path, method: dict[str, object], parts: list[dict[str, Tensor]]) -> Path:
    """The text model as it lies in moonshotai/Kimi-K2.5, beside a part for images."""
    renamed = [{f"language_model.{name}": tensor for name, tensor in part.items()} for part in parts]
    eyes = ["vision_tower.encoder.blocks.0.wqkv.weight", "vision_tower.patch_embed.pos_emb.weight"]
    renamed += [dict.fromkeys([*eyes, "mm_projector.proj.0.weight"], torch.zeros(2, 2))]
    sharded(folder, source, method, [{name: x.clone() for name, x in part.items()} for part in renamed])
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "tie_word_embeddings": False, "media_placeholder_token_id": 90, "use_unified_vision_chunk": True,
        "video_placeholder": "<|video|>", "ignore_index": -100, "vision_config": {"vt_hidden_size": 2},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)
