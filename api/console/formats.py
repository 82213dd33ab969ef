"""How numbers, amounts and times are written on a page. Money is exact: a rounded amount carries its exact value in the
element."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from markupsafe import Markup, escape
from weft.money import dollars, usd as usd_exact

NUSD = 10**9

KIND_NAMES = {
    "train": "Train",
    "prefill": "Prefill",
    "cached_prefill": "Cached prefill",
    "sample": "Sample",
    "storage": "Storage",
}


def usd_text(amount_nusd: int) -> str:
    """An amount to be read: four decimals, or two from a hundred dollars on and where the others are zero."""
    amount, sign = abs(amount_nusd), "−" if amount_nusd < 0 else ""
    if 0 < amount < NUSD // 10_000:
        return "<$0.0001" if not sign else ">−$0.0001"
    decimals = 2 if amount >= 100 * NUSD or amount % (NUSD // 100) == 0 else 4
    unit = NUSD // 10**decimals
    whole, rest = divmod((amount + unit // 2) // unit, 10**decimals)
    return f"{sign}${whole:,}.{rest:0{decimals}d}"


def usd(amount_nusd: int | None) -> Markup:
    """An amount as an element: text to read, and its exact value."""
    if amount_nusd is None:
        return Markup('<span class="muted">–</span>')
    return Markup('<data class="usd" value="{}" title="{}">{}</data>').format(
        usd_exact(amount_nusd), dollars(amount_nusd), usd_text(amount_nusd)
    )


def compact(number: int) -> str:
    """1234567 is "1.23M"."""
    size = abs(number)
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if size >= unit:
            return f"{number / unit:.3g}{name}" if size < 999 * unit else f"{number / unit:.0f}{name}"
    return str(number)


def count(number: int) -> Markup:
    return Markup('<data value="{}" title="{}">{}</data>').format(number, f"{number:,}", compact(number))


def size(size_bytes: int) -> Markup:
    text = f"{size_bytes} B"
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            text = f"{size_bytes / unit:.3g} {name}"
            break
    return Markup('<data value="{}" title="{} bytes">{}</data>').format(size_bytes, f"{size_bytes:,}", text)


def number(value: float) -> str:
    """A logged value, in four digits."""
    return f"{value:.4g}"


def when(at: datetime | None) -> Markup:
    """A time as people say it, with the exact one behind it."""
    if at is None:
        return Markup('<span class="muted">–</span>')
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.isoformat(), f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", ago(datetime.now(UTC) - at)
    )


def ago(passed: timedelta) -> str:
    seconds = abs(passed.total_seconds())
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            text = f"{int(seconds // unit)} {name}"
            break
    else:
        return "just now" if passed >= timedelta(0) else "in a moment"
    return f"{text} ago" if passed >= timedelta(0) else f"in {text}"


def lasts(passed: timedelta) -> Markup:
    """A duration in words: "3 h 20 min"."""
    seconds = int(passed.total_seconds())
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    counts = [
        (seconds % above // unit, name) for (unit, name), above in zip(units, (10**12, 86_400, 3_600, 60), strict=True)
    ]
    first = next((place for place, (number, _) in enumerate(counts) if number), len(counts) - 1)
    text = " ".join(f"{number} {name}" for number, name in counts[first : first + 2] if number) or "0 s"
    return Markup('<data value="{}">{}</data>').format(seconds, text)


def minute(at: datetime) -> Markup:
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), f"{utc:%Y-%m-%d %H:%M:%S}")


def as_data(value: Any) -> Markup:
    """JSON for an attribute; quoted, so that a hostile name stays text."""
    return escape(json.dumps(value, separators=(",", ":")))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


def csv_cell(value: object) -> str:
    """A CSV cell that no spreadsheet reads as a formula. Numbers stay numbers."""
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else text
