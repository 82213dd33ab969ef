"""The rotary embedding of a config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
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

#: More than any share of a head.
_MOST_TURNED = 1e6


def read_rope(fields: Fields, *, theta: float = 10000.0, partial: float | None = None) -> RopeConfig:
    """`theta` and `partial`: what the family has where the config says nothing; `partial` None: the whole head turns in
    this family, and nothing else is supported."""
    numbers = fields.within("rope_scaling", "rope_parameters")
    spelt = [dict(fields.object(key)) for key in ("rope_scaling", "rope_parameters")]
    if all(spelt) and spelt[0] != spelt[1]:  # libraries use one of the two
        fields.refuse(f"rope_scaling={spelt[0]!r} beside rope_parameters={spelt[1]!r}", "one of the two")
    kind = _kind(numbers)
    theta = numbers.number("rope_theta", fields.number("rope_theta", theta, above=1.0), above=1.0)
    share = numbers.get("partial_rotary_factor", fields.get("partial_rotary_factor", partial or 1.0))
    own = numbers.get("partial_rotary_factor")
    if partial is not None and own is None and fields.is_null("partial_rotary_factor"):
        share = None  # libraries take the whole head, whatever the family has
    if type(share) not in (int, float) or not 0 < abs(share) < _MOST_TURNED:  # a share of this head: decoder()
        fields.refuse(f"partial_rotary_factor={share!r}", "the share of a head that turns, above 0 and at most 1")
    if partial is None and share != 1.0:
        fields.refuse(f"partial_rotary_factor={share}", "a rotary embedding of the whole head in this family")
    if not isinstance(kind, str) or kind not in KINDS:
        fields.refuse(f"rope_type={kind!r}", "rope_type " + ", ".join(KINDS))
    must, may = (set(names.split()) for names in KINDS[kind])
    missing = sorted(name for name in must if numbers.get(name) is None)
    if missing:
        fields.refuse(f"{kind} rope without {', '.join(missing)}", f"all numbers of {kind} rope")
    unknown = sorted(
        (name, value) for name, value in numbers.items() if name not in must | may | _COMMON and value is not None
    )
    if unknown and kind != "default":
        fields.refuse(f"{kind} rope with {unknown[0][0]}={unknown[0][1]!r}", f"{sorted(must | may)}")
    return _rope(kind, theta, float(share), numbers, fields.need("max_position_embeddings"))


def _rope(kind: str, theta: float, partial: float, numbers: Fields, context: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    factor = numbers.number("factor", None)
    if kind == "linear":
        return RopeConfig(theta, kind, factor, partial=partial)
    original = numbers.whole("original_max_position_embeddings", context)
    if kind == "llama3":
        low = numbers.number("low_freq_factor", None)
        high = numbers.number("high_freq_factor", None)
        if high <= low:
            numbers.refuse(f"low_freq_factor={low:g}, high_freq_factor={high:g}", "the second above the first")
        return RopeConfig(theta, kind, factor, low, high, original, partial=partial)
    return RopeConfig(
        theta,
        kind,
        factor,
        original_context_length=original,
        beta_fast=numbers.number("beta_fast", 32),
        beta_slow=numbers.number("beta_slow", 1),
        truncate=numbers.flag("truncate", True),
        attention_factor=_attention_factor(factor, numbers),
        partial=partial,
    )


def _attention_factor(factor: float, numbers: Fields) -> float:
    """YaRN's temperature (arXiv 2309.00071, section 3.4), which cos and sin carry."""
    if numbers.get("attention_factor") is not None:
        return numbers.number("attention_factor", None)
    mscale, over = _of_scores(numbers, "mscale"), _of_scores(numbers, "mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, over) if mscale and over else _mscale(factor, 1.0)


def score_scale(fields: Fields) -> float:
    """The factor by which YaRN enlarges scores in latent attention, beside the factor in cos and sin (DeepSeek-V2's
    code)."""
    numbers = fields.within("rope_scaling", "rope_parameters")
    if _kind(numbers) != "yarn":  # YaRN's numbers may be left behind although it was turned off
        return 1.0
    return _mscale(numbers.number("factor", 1.0), _of_scores(numbers, "mscale_all_dim")) ** 2


def _kind(numbers: Fields) -> Any:
    return numbers.get("rope_type", numbers.get("type", "default"))


def _of_scores(numbers: Fields, name: str) -> float:
    """0 stands for none."""
    return numbers.number(name, None) if numbers.get(name, 0) != 0 else 0.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
