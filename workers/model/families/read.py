"""A decoder's numbers from the config.json of a model folder, or a refusal that names what is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.model.config import DecoderConfig, UnsupportedModel, read_json
from workers.model.families.fields import Fields, is_neutral
from workers.model.families.table import FAMILIES, VISION


def read_config(name: str, path: Path) -> DecoderConfig:
    """The decoder's numbers from `path/config.json`. Raises UnsupportedModel for anything that it cannot compute
    exactly."""
    raw = read_json(path / "config.json")
    if not raw:
        raise UnsupportedModel(name, path, "no config.json in the folder", "a local Hugging Face model folder")
    found = raw.get("architectures") or []
    if not isinstance(found, list) or len(found) != 1 or found[0] not in [*FAMILIES, *VISION]:
        raise UnsupportedModel(name, path, f"architectures={found!r}", ", ".join([*FAMILIES, *VISION]))
    architecture, fields = str(found[0]), Fields(name, path, raw)
    if architecture in VISION:
        text = fields.object("text_config")
        if not text:
            fields.refuse(f"text_config={raw.get('text_config')!r}", "the text model's fields there")
        _check_outside(fields, text)
        fields = Fields(name, path, {**text, **{key: raw[key] for key in _OF_THE_WHOLE if key in raw}})
    if not fields.flag("is_causal", True):
        fields.refuse("is_causal=false", "attention to what came before alone")
    _check_quantised(fields)
    config = FAMILIES[VISION.get(architecture, architecture)].read(fields)
    fields.finish()
    return config


#: Fields of a vision model's config.json about vision.
_SEEING = """
vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
media_placeholder_token_id video_placeholder use_unified_vision_chunk projection_hidden_size projection_layer_norm_eps
ignore_index
"""


#: Fields outside of the text model's that hold for the whole model.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")


def _check_outside(fields: Fields, text: Mapping[str, Any]) -> None:
    """Refuse fields about the text model that lie outside of its section, where libraries do not read them."""
    for key, value in fields.items():
        elsewhere = key in (*_SEEING.split(), *_OF_THE_WHOLE, "text_config") or is_neutral(key)
        if value and not elsewhere and value != text.get(key):
            fields.refuse(f"{key}={value!r} outside of text_config", "it within text_config")


#: The quantised forms that stored.py reads, with what their description must say.
_READ: dict[str, dict[str, Any]] = {"fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]}, "mxfp4": {}}


def _check_quantised(fields: Fields) -> None:
    found = fields.object("quantization_config")
    if not found:
        return
    method = found.get("quant_method", "unknown")
    supported = "float32, bfloat16 and float16 weights, block fp8 of 128 x 128, mxfp4 and int4 in groups"
    if method == "compressed-tensors":
        _check_packed(fields, found, supported)
        return
    if not isinstance(method, str) or method not in _READ:
        fields.refuse(f"quantization_config ({method})", supported)
    for key, value in _READ[method].items():
        if found.get(key, value if key == "fmt" else None) != value:
            fields.refuse(f"quantization_config ({method}) with {key}={found.get(key)!r}", supported)


#: The values that the config of compressed-tensors must have for its only group of weights.
_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def _check_packed(fields: Fields, found: Mapping[str, Any], supported: str) -> None:
    groups = found.get("config_groups") or {}
    groups = list(groups.values()) if isinstance(groups, dict) else [groups]
    weights = (groups[0].get("weights") or {}) if groups and isinstance(groups[0], dict) else {}
    if not isinstance(weights, dict) or not all(isinstance(group, dict) for group in groups):
        fields.refuse(f"quantization_config (compressed-tensors) with config_groups={groups!r}", supported)
    wrong = [f"{key}={weights.get(key)!r}" for key, value in _INT4.items() if weights.get(key) != value]
    wrong += [f"{key}={weights[key]!r}" for key in ("actorder", "dynamic", "block_structure") if weights.get(key)]
    wrong += [f"{key} set" for group in groups for key in ("input_activations", "output_activations") if group.get(key)]
    wrong += ["kv_cache_scheme set"] if found.get("kv_cache_scheme") else []
    if found.get("format") != "pack-quantized":
        wrong = [f"format={found.get('format')!r}"]
    elif len(groups) != 1:
        wrong = [f"{len(groups)} config_groups"]
    if wrong:
        fields.refuse(f"quantization_config (compressed-tensors) with {wrong[0]}", supported)
