"""What may be asked for when a run is created or its weights are saved."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
from weft.wire import LoraConfig
from weft.wire.checks.runs import shape_problems, ttl_problems

from api.errors import Invalid, quote, refuse

#: The output of an adapter is scaled by ALPHA / rank, so that a good learning rate hardly depends on the rank.
ALPHA = 32.0
#: Bounds of a checkpoint's life: Tinker's, one hour to ten years.
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 366 * 86_400
MAX_METADATA_BYTES = 16_384
MAX_SEQUENCE = 2**31 - 1


def check_lora(lora: LoraConfig, max_rank: int) -> None:
    refuse(problem.within("lora_config") for problem in shape_problems(lora.rank, lora.seed, max_rank))


def check_ttl(ttl_seconds: int | None) -> None:
    refuse(ttl_problems(ttl_seconds, MIN_TTL_S, MAX_TTL_S), "ttl_seconds")


def check_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Metadata that the database can keep; {} for none."""
    if metadata is None:
        return {}
    try:
        text = orjson.dumps(metadata)
    except orjson.JSONEncodeError as error:
        raise Invalid(f"user_metadata: cannot be stored as JSON: {error}") from None
    if len(text) > MAX_METADATA_BYTES:
        raise Invalid(f"user_metadata: {len(text)} bytes as JSON, the limit is {MAX_METADATA_BYTES}")
    if b"\\u0000" in text:
        raise Invalid("user_metadata: must not contain NUL characters")
    stored: dict[str, Any] = orjson.loads(text)  # NaN, which JSON lacks, has become null
    return stored


def check_text(value: str | None, field: str, max_length: int) -> str | None:
    """A short text that the database can keep."""
    if value is None:
        return None
    if len(value) > max_length:
        raise Invalid(f"{field}: {len(value)} characters, the limit is {max_length}")
    if "\0" in value:
        raise Invalid(f"{field}: must not contain NUL characters, got {quote(value)}")
    return value


def check_sequence(value: int | None, field: str, least: int = 0, most: int = MAX_SEQUENCE) -> int:
    """Check a client's sequence number. Without one, a retry could not be told from a new request."""
    if value is None:
        raise Invalid(f"{field}: required, so that a retry can be told from a new request")
    if not least <= value <= most:
        raise Invalid(f"{field}: must be {least} to {most}, got {value}")
    return value


def check_utc(at: datetime, field: str) -> datetime:
    """`at` in UTC. Refused if it is outside of the calendar there: 0001-01-01T00:00+01:00 is before the year 1."""
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise Invalid(f"{field}: is outside of the years 1 to 9999 in UTC, got {at.isoformat()}") from None
