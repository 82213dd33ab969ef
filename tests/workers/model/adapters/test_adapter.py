"""Adapters in memory (arenas) and on disk (folders): their shapes, sizes, first values and exact round trips."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.model.adapters.adapter import Adapter, AdapterFileError, adapter_bytes, load_adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig, LatentConfig

QWEN3_30B_A3B = DecoderConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    context_length=40960,
    num_experts=128,
    experts_per_token=8,
    moe_intermediate_size=768,
)
TINY = replace(
    QWEN3_30B_A3B, vocab_size=50, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=20, num_experts=3, experts_per_token=2, moe_intermediate_size=10, dense_layers=(0,),
)  # fmt: skip


def test_parameters_per_rank_of_qwen3_30b_a3b() -> None:
    # Published MLP count: layers * 3 * (experts * width + hidden), the hidden side shared over experts.
    mlp = AdapterShape(QWEN3_30B_A3B, 1, train_attn=False, train_unembed=False)
    assert mlp.num_parameters == 14_450_688 == 48 * 3 * (128 * 768 + 2048)
    attn = AdapterShape(QWEN3_30B_A3B, 1, train_mlp=False, train_unembed=False)
    assert attn.num_parameters == 48 * (3 * 2048 + 4096 + 512 + 512 + 4096 + 2048)
    unembed = AdapterShape(QWEN3_30B_A3B, 1, train_attn=False, train_mlp=False)
    assert unembed.num_parameters == 2048 + 151936
    assert AdapterShape(QWEN3_30B_A3B, 8).num_parameters == 123_522_048


def test_arena_is_aligned_and_its_views_do_not_overlap() -> None:
    shape = AdapterShape(TINY, 3)
    adapter = Adapter.zeros(shape)
    assert all(slot.offset % 16 == 0 for slot in shape.slots.values())
    assert 0 <= shape.numel - shape.num_parameters < 16 * len(shape.slots)
    for view in adapter.views.values():
        view += 1
    assert adapter.flat.sum() == shape.num_parameters
    assert adapter.flat.max() == 1
    assert adapter.view("layers.0.mlp.gate_B").shape == (20, 3)
    assert adapter.view("layers.1.mlp.gate_B").shape == (3, 10, 3)
    assert adapter.view("layers.1.mlp.down_A").shape == (3, 3, 10)
    assert adapter.view("layers.1.attn.qkv_A").shape == (9, 24)
    with pytest.raises(KeyError):
        Adapter.zeros(AdapterShape(TINY, 3, train_mlp=False)).view("layers.1.mlp.gate_B")


def test_shared_experts_and_latents_have_factors_too() -> None:
    config = replace(TINY, shared_intermediate_size=6, expert_latent=5)
    at = "layers.1.mlp."
    shapes = {name.removeprefix(at): slot.shape for name, slot in AdapterShape(config, 3).slots.items() if at in name}
    latent = {"latent_in_A": (3, 24), "latent_in_B": (5, 3), "latent_out_A": (3, 5), "latent_out_B": (24, 3)}
    shared = {"gate_up_A": (6, 24), "gate_B": (6, 3), "up_B": (6, 3), "down_A": (3, 6), "down_B": (24, 3)}
    experts = {"gate_up_A": (6, 5), "gate_B": (3, 10, 3), "up_B": (3, 10, 3), "down_A": (3, 3, 10), "down_B": (5, 3)}
    assert shapes == experts | latent | {f"shared.{name}": shape for name, shape in shared.items()}


def test_latent_attention_has_factors_up_to_its_latents() -> None:
    latent = LatentConfig(q_rank=0, kv_rank=7, plain_dim=4, rope_dim=4, value_dim=8, scale=1.0)
    whole, part = (replace(TINY, latent=each) for each in (latent, replace(latent, q_rank=6)))
    at = "layers.0.attn."
    queries = [
        {name.removeprefix(at): slot.shape for name, slot in AdapterShape(config, 3).slots.items() if at in name}
        for config in (whole, part)
    ]
    both = {"latent_A": (6, 24), "kv_a_B": (11, 3), "o_A": (3, 32), "o_B": (24, 3)}
    assert queries == [both | {"q_B": (32, 3)}, both | {"q_a_B": (6, 3)}]


def test_init_is_seeded_and_starts_as_the_base_model() -> None:
    shape = AdapterShape(TINY, 4)
    adapter = Adapter.init(shape, seed=7, scale=2.0)
    assert torch.equal(adapter.flat, Adapter.init(shape, seed=7).flat)
    assert not torch.equal(adapter.flat, Adapter.init(shape, seed=8).flat)
    for name, view in adapter.views.items():
        if name.endswith("_B"):
            assert not view.any(), name
        else:
            bound = view.shape[-1] ** -0.5
            assert 0.8 * bound < view.abs().max() <= bound, name
            assert abs(view.mean()) < 0.3 * bound, name


def test_shapes_and_arenas_are_validated() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        AdapterShape(TINY, 0)
    with pytest.raises(ValueError, match="must train something"):
        AdapterShape(TINY, 1, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(ValueError, match="arena of float32"):
        Adapter(AdapterShape(TINY, 1), torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        Adapter(shape := AdapterShape(TINY, 1), torch.zeros(shape.numel, dtype=torch.float64), 1.0)


def test_folder_round_trip_is_exact(tmp_path: Path) -> None:
    adapter = Adapter.init(AdapterShape(TINY, 3, train_unembed=False), seed=1, scale=1 / 3)
    adapter.view("layers.1.mlp.down_B").normal_()
    extra = {"step": torch.tensor(5), "m": torch.randn(adapter.shape.numel)}
    save_adapter(adapter, tmp_path / "a", base_model="tiny/model", extra=extra, details={"seed": 1})
    loaded = load_adapter(tmp_path / "a", TINY)
    assert torch.equal(loaded.adapter.flat, adapter.flat)
    assert loaded.adapter.shape == adapter.shape
    assert adapter_bytes(tmp_path / "a", TINY) == 4 * adapter.shape.numel
    assert loaded.adapter.scale == 1 / 3
    assert (loaded.base_model, loaded.details) == ("tiny/model", {"seed": 1})
    assert loaded.extra.keys() == extra.keys()
    assert all(torch.equal(loaded.extra[k], extra[k]) for k in extra)
    fields = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (fields["rank"], fields["alpha"], fields["train_unembed"]) == (3, 1.0, False)
    save_adapter(adapter, tmp_path / "a", base_model="tiny/model")
    assert load_adapter(tmp_path / "a", TINY).extra == {}


def test_loading_is_strict(tmp_path: Path) -> None:
    adapter = Adapter.init(AdapterShape(TINY, 3), seed=1)
    save_adapter(adapter, tmp_path, base_model="m", extra={"m": torch.zeros(1)})
    save_file({"v": torch.zeros(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(AdapterFileError, match=r"extra\.safetensors holds \['v'\], adapter_config\.json \['m'\]"):
        load_adapter(tmp_path, TINY)
    save_adapter(adapter, tmp_path, base_model="m")
    with pytest.raises(AdapterFileError, match=r"unembed_B is .*\[50, 3\], the model needs .*\[60, 3\]"):
        load_adapter(tmp_path, replace(TINY, vocab_size=60))
    file = tmp_path / "adapter.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "unembed_A": tensors["unembed_A"].half()}, file)
    with pytest.raises(AdapterFileError, match=r"unembed_A is torch\.float16"):
        load_adapter(tmp_path, TINY)
    save_file({("other" if k == "unembed_A" else k): v for k, v in tensors.items()}, file)
    with pytest.raises(AdapterFileError, match=r"missing tensors \['unembed_A'\], unexpected tensors \['other'\]"):
        load_adapter(tmp_path, TINY)
    save_file({**tensors, "other": torch.zeros(1)}, file)
    with pytest.raises(AdapterFileError, match=r"missing tensors \[\], unexpected tensors \['other'\]"):
        load_adapter(tmp_path, TINY)
    file.unlink()
    with pytest.raises(AdapterFileError, match="is missing"):
        load_adapter(tmp_path, TINY)
    (tmp_path / "adapter_config.json").write_text('{"format": "weft-shared-outer-1", "rank": 3}')
    with pytest.raises(AdapterFileError, match="bad or missing field"):
        load_adapter(tmp_path, TINY)
    (tmp_path / "adapter_config.json").write_text('{"format": "weft-shared-outer-1", "train_attn": true, "rank": 0}')
    with pytest.raises(AdapterFileError, match="bad or missing field"):
        adapter_bytes(tmp_path, TINY)
    (tmp_path / "adapter_config.json.age").touch()
    with pytest.raises(AdapterFileError, match="is encrypted: only its recipients can read it"):
        load_adapter(tmp_path, TINY)
    with pytest.raises(AdapterFileError, match="has format None"):
        load_adapter(tmp_path / "absent", TINY)
