"""The numbers that charts draw, as JSON. Heights are dollars as floats; sums are never computed from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, time
from typing import Any

from billing.reports.spending import DayRow, Window

KINDS = ("train", "sample", "prefill", "cached_prefill", "storage")


def cost_by_day(window: Window, rows: Sequence[DayRow]) -> dict[str, Any]:
    """Dollars per day, over all days of the window: one series for each kind that cost anything."""
    amounts: defaultdict[str, dict[Any, int]] = defaultdict(dict)
    for row in rows:
        amounts[row.kind][row.day] = row.amount_nusd
    kinds = [kind for kind in KINDS if any(amounts[kind].values())]
    kinds += sorted(kind for kind in amounts if kind not in KINDS)
    return {
        "days": [int(datetime.combine(day, time(), UTC).timestamp()) for day in window.days],
        "series": [{"kind": kind, "usd": [amounts[kind].get(day, 0) / 10**9 for day in window.days]} for kind in kinds],
    }


def daily_totals(window: Window, rows: Sequence[DayRow]) -> list[int]:
    """Nano-USD of each day."""
    totals = dict.fromkeys(window.days, 0)
    for row in rows:
        totals[row.day] += row.amount_nusd
    return list(totals.values())
