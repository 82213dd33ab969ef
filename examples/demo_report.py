"""What the demo shows at the end: a table, a picture, and whether the ledger adds up."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table
from weft.wire.account.usage import Stats, UsageResponse

ENDS = 5  # steps at either end whose mean is compared


@dataclass
class Curve:
    """One tenant's measure, step by step."""

    organisation: str
    metric: str
    values: list[float] = field(default_factory=list)
    operations: int = 0

    def ends(self) -> tuple[float, float]:
        """Mean of the first and of the last steps."""
        n = min(ENDS, len(self.values))
        return sum(self.values[:n]) / n, sum(self.values[-n:]) / n


def table(curves: list[Curve], usage: dict[str, UsageResponse], stats: Stats) -> Table:
    """Reward or loss first and last, tokens and dollars by kind and organisation, and how the machines were shared."""
    made = Table(title="Two tenants, one base model")
    for heading in ("organisation", "measure", "first", "last", "kind", "tokens", "US$"):
        made.add_column(heading, justify="left" if heading in ("organisation", "measure", "kind") else "right")
    for curve in curves:
        first, last = curve.ends()
        by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for row in usage[curve.organisation].rows:
            by_kind[row.kind][0] += row.tokens
            by_kind[row.kind][1] += row.amount_nusd
        head = (curve.organisation, curve.metric, f"{first:.3f}", f"{last:.3f}")
        for kind, (tokens, nusd) in by_kind.items():
            made.add_row(*head, kind, f"{tokens:,}", f"{nusd / 1e9:.6f}")
            head = ("", "", "", "")
        made.add_row("", "", "", "", "total", "", f"{usage[curve.organisation].total_nusd / 1e9:.6f}")
        made.add_section()
    trainer, generator = stats.trainer, stats.generator
    shared = trainer["shared_passes"] / max(1, trainer["passes"])
    busy = generator["slots_busy"] / max(1, generator["slots_offered"])
    made.caption = (
        f"{shared:.0%} of {trainer['passes']} trainer passes carried both tenants; "
        f"generator slots were {busy:.0%} occupied while it worked.\n"
        "The base model was pretrained on sums, so that a minute of RL has something to find."
    )
    return made


def draw(curves: list[Curve], path: Path) -> None:
    figure, axes = plt.subplots(1, len(curves), figsize=(10, 3.6), constrained_layout=True)
    for axis, curve, colour in zip(axes, curves, ("#2b6cb0", "#b7472a"), strict=True):
        axis.plot(curve.values, color=colour, linewidth=2)
        axis.set(title=curve.organisation, xlabel="step", ylabel=curve.metric)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)


#: Which usage a finished operation must have left behind.
_METERED = {"forward_backward": {"train"}, "forward": {"prefill"}, "sample": {"prefill", "cached_prefill", "sample"}}


def check_ledger(database: Path, usage: dict[str, UsageResponse]) -> list[str]:
    """Hold the bills against the operations that were run, straight from the database. Returns what does not add up."""
    problems = []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        operations = db.execute("select id, kind, state from operations").fetchall()
        events = db.execute("select operation_id, kind, quantity, rate_uusd, amount_nusd from usage_events").fetchall()
        billed = dict(
            db.execute(
                "select o.name, sum(u.amount_nusd) from usage_events u"
                " join organisations o on o.id = u.org_id group by o.name"
            ).fetchall()
        )
    metered: dict[str, set[str]] = defaultdict(set)
    for operation_id, kind, quantity, rate, amount in events:
        metered[operation_id].add(kind)
        if amount != (quantity * rate * 1000 + 500_000) // 1_000_000:
            problems.append(f"{operation_id}: {quantity} {kind} tokens are billed {amount} nano-dollars")
    for operation_id, kind, state in operations:
        allowed = _METERED.get(kind, set()) if state == "done" else set()
        found = metered.pop(operation_id, set())
        if not found <= allowed or (allowed and not found):
            problems.append(
                f"{kind} {operation_id} ({state}) has usage {sorted(found)}, expected within {sorted(allowed)}"
            )
    problems += [f"usage of an operation that does not exist: {operation_id}" for operation_id in metered]
    for organisation, bill in usage.items():
        if billed.get(organisation, 0) != bill.total_nusd:
            problems.append(
                f"{organisation} was shown {bill.total_nusd} nano-dollars, the ledger has {billed.get(organisation)}"
            )
    return problems
