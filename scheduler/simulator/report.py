"""What `weftd simulate` tells: the same tenants under the fair order and first come, first served, beside one alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.order.fair import FairTree
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import ByArrival, Result, Simulation
from scheduler.simulator.workloads import CHAT, REASONING, SMALL, TOOLS, Workload, tenants_of

COLUMNS = (
    "tenants", "order", "slots busy", "trainer wait", "sampled/s", "trained/s", "half-way Mtok", "$/Mtok",
    "wait p50", "wait p95",
)  # fmt: skip
#: Loads of RL, each played for one tenant alone.
ALONE = (REASONING, TOOLS)
#: Workloads whose own waits are reported: those that a flood would hurt.
WATCHED = (CHAT, SMALL, TOOLS)


@dataclass(frozen=True)
class Row:
    """A line of the report. `half_way_mtok`: sampled for steps that were not over at the end of the time."""

    tenants: str
    order: str
    utilisation: float
    trainer_wait: float
    sampled_per_s: float
    trained_per_s: float
    half_way_mtok: float
    usd_per_mtok: float
    wait_p50_s: float
    wait_p95_s: float
    backfill: float
    watched_p95_s: dict[str, float]

    @classmethod
    def of(cls, tenants: str, order: str, result: Result) -> Row:
        return cls(
            tenants,
            order,
            result.utilisation,
            result.trainer_wait,
            result.sampled_tokens / result.seconds,
            result.trained_tokens / result.seconds,
            result.half_way_tokens / 1e6,
            result.usd_per_mtok,
            quantile(result.waits_s(), 0.5),
            quantile(result.waits_s(), 0.95),
            result.backfill,
            {load.name: quantile(result.waits_s(load.name), 0.95) for load in WATCHED},
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def compare(cluster: Cluster, counts: Sequence[int], hours: float, seed: int = 0, after: float = 0.0) -> Iterator[Row]:
    """The rows of the report: one tenant alone, for each RL load; then each count of mixed tenants, in fair order and
    by arrival. `hours` are counted, beginning `after` that many. Each row takes a while."""

    def row(tenants: str, order: str, loads: Sequence[Workload], queue: type[FairTree[Any]] = FairTree) -> Row:
        played = Simulation(cluster, loads, seed=seed, queue=queue).run(hours * 3600, after * 3600)
        return Row.of(tenants, order, played)

    for load in ALONE:
        yield row(f"1 {load.name}", "alone", [load])
    for count in counts:
        yield row(str(count), "fair", tenants_of(count))
        yield row(str(count), "by arrival", tenants_of(count), ByArrival)


def table(rows: Sequence[Row]) -> str:
    names = [load.name for load in WATCHED]
    heads = [*COLUMNS, *(f"{name} p95" for name in names)]
    lines = [heads] + [
        [
            row.tenants,
            row.order,
            f"{row.utilisation:.1%}",
            f"{row.trainer_wait:.1%}",
            f"{row.sampled_per_s:,.0f}",
            f"{row.trained_per_s:,.0f}",
            f"{row.half_way_mtok:,.0f}",
            f"{row.usd_per_mtok:.2f}",
            *(f"{wait:,.0f} s" for wait in (row.wait_p50_s, row.wait_p95_s, *row.watched_p95_s.values())),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Utilisation, waits, throughput and price over the number of tenants. Needs matplotlib; PNG or SVG by the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 2)
    drawn: list[tuple[str, Any]] = [
        ("slots busy", lambda row: row.utilisation),
        ("p95 wait of a chat, s", lambda row: max(row.watched_p95_s[CHAT.name], 0.1)),
        ("tokens/s, sampled and trained", lambda row: row.sampled_per_s + row.trained_per_s),
        ("$ per Mtok", lambda row: row.usd_per_mtok),
    ]
    for axes, (title, value) in zip(panels.flat, drawn, strict=True):
        for order in ("fair", "by arrival"):
            line = [row for row in rows if row.order == order]
            axes.plot([int(row.tenants) for row in line], [value(row) for row in line], marker="o", label=order)
        if "wait" not in title:
            for row, style in zip([row for row in rows if row.order == "alone"], ("--", ":"), strict=False):
                axes.axhline(value(row), linestyle=style, color="grey", label=f"{row.tenants} alone")
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tenants")
        axes.grid(alpha=0.3)
    panels[0][1].set_yscale("log")
    panels[0][0].legend()
    figure.savefig(path)
