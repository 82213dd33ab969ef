"""The rotary embedding of a config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workers.model.config import RopeConfig
from workers.model.families.fields import Fields

#: Kind -> the numbers that it must have, and those that it may have.
KINDS: dict[str, tuple[str, str]] = {
    "default": ("", ""),
    "linear": ("factor", ""),
    "llama3": ("factor low_freq_factor high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings beta_fast beta_slow truncate attention_factor mscale mscale_all_dim",
    ),
}
#: Fields of any kind. `finetuned` says how a context was stretched, `mrope_*` how the positions of images turn: of text
#: both change nothing.
_COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",
    "mrope_section",
    "mrope_interleaved",
}


def read_rope(fields: Fields, *, theta: float = 10000.0, partial: float | None = None) -> RopeConfig:
    """`theta` and `partial`: what the family has where the config says nothing; `partial` None: the whole head turns in
    this family, and nothing else is supported."""
    numbers = {**fields.numbers("rope_scaling"), **fields.numbers("rope_parameters")}
    kind = numbers.get("rope_type") or numbers.get("type") or "default"
    theta = float(numbers.get("rope_theta") or fields.number("rope_theta", theta))
    fields.get("rope_theta")
    share = numbers.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or partial or 1.0
    if partial is None and share != 1.0:
        fields.refuse(f"partial_rotary_factor={share}", "a rotary embedding of the whole head in this family")
    if kind not in KINDS:
        fields.refuse(f"rope_type={kind!r}", "rope_type " + ", ".join(KINDS))
    must, may = (set(names.split()) for names in KINDS[kind])
    missing = sorted(name for name in must if numbers.get(name) is None)
    if missing:
        fields.refuse(f"{kind} rope without {', '.join(missing)}", f"all numbers of {kind} rope")
    unknown = sorted(name for name, value in numbers.items() if value is not None and name not in must | may | _COMMON)
    if unknown and kind != "default":
        fields.refuse(f"{kind} rope with {unknown[0]}={numbers[unknown[0]]!r}", f"{sorted(must | may)}")
    return _rope(kind, theta, float(share), numbers, fields.need("max_position_embeddings"))


def _rope(kind: str, theta: float, partial: float, numbers: Mapping[str, Any], context: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    factor = float(numbers["factor"])
    if kind == "linear":
        return RopeConfig(theta, kind, factor, partial=partial)
    original = int(numbers.get("original_max_position_embeddings") or context)
    if kind == "llama3":
        low, high = float(numbers["low_freq_factor"]), float(numbers["high_freq_factor"])
        return RopeConfig(theta, kind, factor, low, high, original, partial=partial)
    return RopeConfig(
        theta,
        kind,
        factor,
        original_context_length=original,
        beta_fast=float(numbers.get("beta_fast") or 32),
        beta_slow=float(numbers.get("beta_slow") or 1),
        truncate=bool(numbers.get("truncate", True)),
        attention_factor=_attention_factor(factor, numbers),
        partial=partial,
    )


def _attention_factor(factor: float, numbers: Mapping[str, Any]) -> float:
    """YaRN's temperature (arXiv 2309.00071, section 3.4), which cos and sin carry."""
    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    mscale, over = numbers.get("mscale"), numbers.get("mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, over) if mscale and over else _mscale(factor, 1.0)


def score_scale(fields: Fields) -> float:
    """What YaRN makes scores larger by in latent attention, beside what cos and sin carry (DeepSeek-V2's code)."""
    numbers = {**fields.numbers("rope_scaling"), **fields.numbers("rope_parameters")}
    return _mscale(float(numbers.get("factor") or 1.0), float(numbers.get("mscale_all_dim") or 0.0)) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
