"""Damaged checkpoints of others: each is refused, and the error names the file or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.model.models import reference
from workers.model.base.stored import Stored
from workers.model.base.weights import ModelWeightsError, load_decoder
from workers.model.card import UnsupportedModel

Tensors = dict[str, Tensor]
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def saved(family: str, folder: Path) -> Tensors:
    reference(family).save_pretrained(folder)
    return load_file(folder / ONE)


def parted(folder: Path, tensors: Tensors, **weight_map: Any) -> None:
    """A checkpoint in two shards, and its index without `weight_map`."""
    (folder / ONE).unlink()
    names = sorted(tensors)
    where = {name: f"{'ab'[n % 2]}.safetensors" for n, name in enumerate(names)}
    for shard in sorted(set(where.values())):
        save_file({name: tensors[name] for name in names if where[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": where | weight_map}))


def cut(folder: Path, tensors: Tensors) -> None:
    whole = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(whole[: len(whole) // 2])


def endless(folder: Path, tensors: Tensors) -> None:
    (folder / ONE).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def empty(folder: Path, tensors: Tensors) -> None:
    (folder / ONE).write_bytes(b"")


def outside(folder: Path, tensors: Tensors) -> None:
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder.parent / "c.safetensors")
    parted(folder, tensors, **{"model.norm.weight": "../c.safetensors"})


def absolute(folder: Path, tensors: Tensors) -> None:
    parted(folder, tensors, **{"model.norm.weight": str(folder / "a.safetensors")})


def missing(folder: Path, tensors: Tensors) -> None:
    parted(folder, tensors)
    (folder / "b.safetensors").unlink()


def dangling(folder: Path, tensors: Tensors) -> None:
    missing(folder, tensors)
    (folder / "b.safetensors").symlink_to(folder / "nothing")


def no_map(folder: Path, tensors: Tensors) -> None:
    parted(folder, tensors)
    (folder / INDEX).write_text('{"weight_map": ["a.safetensors"]}')


def numbered(folder: Path, tensors: Tensors) -> None:
    parted(folder, tensors, **{"model.norm.weight": 3})


def twice(folder: Path, tensors: Tensors) -> None:
    parted(folder, tensors)
    shards = {shard: load_file(folder / f"{shard}.safetensors") for shard in "ab"}
    save_file(shards["b"] | {"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    save_file(shards["a"] | {"model.norm.weight": tensors["model.norm.weight"]}, folder / "a.safetensors")


def integers(folder: Path, tensors: Tensors) -> None:
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int64)}, folder / ONE)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, r"/model\.safetensors is not a whole safetensors file"),
        (endless, r"/model\.safetensors is not a whole safetensors file"),
        (empty, r"/model\.safetensors is not a whole safetensors file"),
        (outside, r"index\.json names a file outside of the folder: '\.\./c\.safetensors'"),
        (absolute, r"index\.json names a file outside of the folder: '/.*/a\.safetensors'"),
        (missing, r"names files that are not there: \['b\.safetensors'\]"),
        (dangling, r"names files that are not there: \['b\.safetensors'\]"),
        (no_map, r"index\.json has no weight_map"),
        (numbered, r"index\.json has no weight_map"),
        (twice, r"/b\.safetensors: tensor model\.norm\.weight is in a\.safetensors as well"),
        (integers, r"tensor model\.norm\.weight is torch\.int64 \[64\], the config needs floating point"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    spoil: Callable[[Path, Tensors], None], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    spoil(folder, saved("llama-tied", folder))
    with pytest.raises((ModelWeightsError, UnsupportedModel), match=says):
        load_decoder(folder)


def test_shards_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    parted(folder, saved("llama-tied", folder))
    (folder / "a.safetensors").rename(tmp_path / "blob")
    (folder / "a.safetensors").symlink_to(tmp_path / "blob")
    load_decoder(folder)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt-oss", "model.layers.0.mlp.experts.down_proj_bias"),
        ("qwen3.5-moe", "model.layers.1.linear_attn.conv1d.weight"),
        ("qwen3.5-moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("nemotron-h", "model.layers.0.mixer.D"),
        ("glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (3, 1, 2), (0, 7)], ids=str)
def test_a_tensor_of_another_shape_is_named(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = saved(family, tmp_path)
    (found,) = [each for each in tensors if each.endswith(name.removeprefix("model."))]
    save_file(tensors | {found: torch.zeros(shape)}, tmp_path / ONE)
    with pytest.raises(ModelWeightsError) as refused:
        load_decoder(tmp_path)
    assert f"tensor {found} is torch.float32 {list(shape)}, the config needs" in str(refused.value)


FP8, INT4 = torch.zeros(200, 300).to(torch.float8_e4m3fn), torch.zeros(8, 8, dtype=torch.int32)
FP4 = torch.zeros(2, 8, 3, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    "parts",
    [
        {"": FP8, "_scale_inv": torch.ones(1, 3)},
        {"": FP8, "_scale_inv": torch.ones(4, 5)},  # for blocks of 64
        {"": FP8, "_scale_inv": torch.ones(1)},
        {"_blocks": FP4, "_scales": torch.zeros(2, 8, 2, dtype=torch.uint8)},
        {"_blocks": FP4, "_scales": torch.zeros(3, 8, 3, dtype=torch.uint8)},
        {"_blocks": FP4[0], "_scales": torch.zeros(8, 3, dtype=torch.uint8)},
        {"_packed": INT4, "_scale": torch.ones(8, 4), "_shape": torch.tensor([8, 64])},  # for groups of 16
        {"_packed": INT4, "_scale": torch.ones(8, 2), "_shape": torch.tensor([8, 128])},
        {"_packed": INT4, "_scale": torch.ones(8, 2), "_shape": torch.tensor([64])},
    ],
)
def test_scales_of_other_blocks_are_refused(parts: Tensors, tmp_path: Path) -> None:
    """Also if there are more of them than blocks: the first ones would be taken for the scales of the blocks."""
    save_file({f"w{part}": tensor.clone() for part, tensor in parts.items()}, tmp_path / "x.safetensors")
    stored = Stored([tmp_path / "x.safetensors"])
    with pytest.raises(ValueError, match=r"/x\.safetensors: tensor w cannot be read: "):
        stored.read("w")
