"""What the service tells its users about a base model, and the check that a folder holds one it can serve.

Read once when a process starts; free of torch and transformers because the API imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig, UnsupportedModel, read_json
from workers.model.families.read import read_config

__all__ = ["DecoderConfig", "ModelCard", "UnsupportedModel", "config_card", "read_card", "weight_files"]

#: Any one of these sets of files makes a tokenizer that transformers can load.
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class ModelCard:
    """A base model as users see it. `eos_token_ids` end a generation; `context_length` is prompt plus completion."""

    name: str
    path: Path
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return self.config.architecture

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_experts(self) -> int:
        return self.config.num_experts

    def adapter_parameters(self, rank: int, attn: bool, mlp: bool, unembed: bool) -> int:
        """Of a run's adapter that trains these parts."""
        return AdapterShape(self.config, rank, attn, mlp, unembed).num_parameters


def read_card(name: str, path: str | Path) -> ModelCard:
    """The card of the model in folder `path`, served as `name`. Raises UnsupportedModel when it cannot be served."""
    folder = Path(path)
    if not folder.is_dir():
        raise UnsupportedModel(name, folder, "no such folder", "a local Hugging Face model folder")
    config = read_config(name, folder)
    weight_files(name, folder)
    if not any(all((folder / file).is_file() for file in files) for files in TOKENIZER_FILES):
        raise UnsupportedModel(name, folder, "no tokenizer", "a folder with tokenizer.json beside the weights")
    generation = read_json(folder / "generation_config.json")
    raw = read_json(folder / "config.json")
    text = raw.get("text_config") or {}
    eos = dict.fromkeys(
        [*_ids(generation.get("eos_token_id")), *_ids(raw.get("eos_token_id")), *_ids(text.get("eos_token_id"))]
    )
    return ModelCard(name=name, path=folder, config=config, eos_token_ids=tuple(eos))


def config_card(name: str, path: Path) -> ModelCard:
    """The card of a model of which only config.json may be there: to plan with, not to serve."""
    return ModelCard(name, path, read_config(name, path), ())


def weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the one file, or every shard of the index, all present."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UnsupportedModel(name, folder, "no model.safetensors", "weights in safetensors files, one or sharded")
    shards = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        problem = f"the safetensors index names files that are not there: {missing[:3]}"
        raise UnsupportedModel(name, folder, problem, "a folder with every shard of the index")
    return [folder / shard for shard in shards]


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]
