"""Bodies of Weft's own endpoints: usage and money, operator statistics, tokenizer files."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from weft.wire.base import Response

__all__ = ["Stats", "TokenizerFilesResponse", "UsageKind", "UsageResponse", "UsageRow"]

UsageKind = Literal["train", "prefill", "cached_prefill", "sample"]


class UsageRow(Response):
    """Tokens of one kind that one run (None: sampling of a base model) has used, and what they cost. Storage is counted
    in bytes times hours.

    `amount_nusd` is in billionths of a dollar and is the amount that is billed; `amount_usd` is the same for reading.
    """

    run_id: str | None
    kind: UsageKind | Literal["storage"]
    base_model: str
    tokens: int = 0
    byte_hours: int = 0
    amount_nusd: int
    amount_usd: str


class UsageResponse(Response):
    """`held_nusd` is the most that operations under way may cost beside the total."""

    rows: list[UsageRow]
    total_nusd: int
    total_usd: str
    price_version: str
    held_nusd: int = 0


#: The folder of a tokenizer in which transformers looks for further chat templates.
CHAT_TEMPLATES = "additional_chat_templates"


class TokenizerFilesResponse(Response):
    """The tokenizer files of a model: SHA-256, in hex, by file name. `templates`: those in CHAT_TEMPLATES, as one for
    tools."""

    files: dict[str, str]
    templates: dict[str, str] = Field(default_factory=dict)


class ReplicaStatus(Response):
    """The replica that answers, where several serve together: whether it leads training and reaches Redis."""

    name: str
    leads: bool
    redis: bool


class Stats(Response):
    """How the machines are doing: `queue` counts operations and runs; `trainer` and `generator` are whatever their
    engines count, among it passes, shared passes and slots."""

    queue: dict[str, int] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)
    generator: dict[str, Any] = Field(default_factory=dict)
    replica: ReplicaStatus | None = None
