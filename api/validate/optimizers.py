"""The check of an optimizer step before it is accepted."""

from __future__ import annotations

from typing import Any

from weft.wire import AdamParams

from api.errors import Invalid, quote

ADAM = "adamw"
#: The optimizer of every run, as clients are told.
ADAM_CONFIG = {"type": ADAM}


def check_family(config: Any, field: str) -> None:
    """Refuse, by name, an optimizer that this server does not have. Absent means AdamW."""
    family = config.get("type", ADAM) if isinstance(config, dict) else getattr(config, "type", ADAM)
    if config is not None and family != ADAM:
        raise Invalid(f"{field}: the optimizer {quote(family)} is not supported; this server has {ADAM}")


def check_adam(params: AdamParams, field: str = "adam_params") -> None:
    """What the type does not say: with eps 0, a weight that got no gradient yet would become 0 / 0."""
    if params.eps == 0:
        raise Invalid(f"{field}.eps: must be above 0, got {params.eps}")
