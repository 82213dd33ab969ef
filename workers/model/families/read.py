"""A decoder's numbers from the config.json of a model folder, or a refusal that names what is not supported."""

from __future__ import annotations

from pathlib import Path

from workers.model.config import DecoderConfig, UnsupportedModel, read_json
from workers.model.families.fields import Fields
from workers.model.families.table import FAMILIES


def read_config(name: str, path: Path) -> DecoderConfig:
    """The decoder's numbers from `path/config.json`. Raises UnsupportedModel for anything that it cannot compute
    exactly."""
    raw = read_json(path / "config.json")
    if not raw:
        raise UnsupportedModel(name, path, "no config.json in the folder", "a local Hugging Face model folder")
    found = raw.get("architectures") or []
    if len(found) != 1 or found[0] not in FAMILIES:
        raise UnsupportedModel(name, path, f"architectures={found!r}", ", ".join(FAMILIES))
    fields = Fields(name, path, raw)
    _refuse_quantised(fields)
    config = FAMILIES[found[0]].read(fields)
    fields.finish()
    return config


def _refuse_quantised(fields: Fields) -> None:
    quantised = fields.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        fields.refuse(f"quantization_config ({method})", "float32, bfloat16 and float16 weights")
