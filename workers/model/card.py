"""What the service tells its users about a base model, and the check that a folder holds one it can serve.

Read once when a process starts; free of torch and transformers because the API imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig, UnsupportedModel, read_json
from workers.model.families.fields import MOST
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
        """Number of parameters of a run's adapter that trains these parts."""
        return AdapterShape(self.config, rank, attn, mlp, unembed).num_parameters


def read_card(name: str, path: str | Path) -> ModelCard:
    """The card of the model in folder `path`, served as `name`. Raises UnsupportedModel if it cannot be served."""
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
    eos: dict[int, None] = {}
    for file, said in (("generation_config.json", generation), ("config.json", raw), ("config.json", text)):
        found = said.get("eos_token_id")
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < MOST for token in ids):
            raise UnsupportedModel(
                name, folder, f"{file} has eos_token_id={found!r}", "a token's id, or a list of them"
            )
        eos |= dict.fromkeys(ids)
    return ModelCard(name=name, path=folder, config=config, eos_token_ids=tuple(eos))


def config_card(name: str, path: Path) -> ModelCard:
    """The card of a model folder that may contain only config.json: for planning, not for serving."""
    return ModelCard(name, path, read_config(name, path), ())


def weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the one file, or every shard of the index, all present."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UnsupportedModel(name, folder, "no model.safetensors", "weights in safetensors files, one or sharded")
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
        raise UnsupportedModel(name, folder, f"{index.name} has no weight_map", "the name of a file for each tensor")
    shards = sorted(set(named.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        problem = f"{index.name} names a file outside of the folder: {outside[0]!r}"
        raise UnsupportedModel(name, folder, problem, "shards beside the index")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        problem = f"the safetensors index names files that are not there: {missing[:3]}"
        raise UnsupportedModel(name, folder, problem, "a folder with every shard of the index")
    return [folder / shard for shard in shards]
