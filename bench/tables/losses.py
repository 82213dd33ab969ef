"""How far sampler and trainer differ, and how losses deal with that."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from bench.tables.grids import claims, grid, number, read


def quarters(runs: list[list[float]]) -> tuple[float, float]:
    """Means over seeds, of the first and of the last quarter of the batches."""
    count = max(1, len(runs[0]) // 4)
    return fmean(v for run in runs for v in run[:count]), fmean(v for run in runs for v in run[-count:])


def drifted(found: dict[str, Any]) -> str:
    """The drifts of bench/mismatch.py, by setting and loss."""
    rows = []
    for setting, losses in found["drift"].items():
        asked = found["settings"][setting]
        part = asked.get("followed", 1)
        told = f"noise {asked['noise']:g}, {f'{part:g} of each update, ' if part < 1 else ''}"
        told += f"steps on a batch: {asked['steps']}, {len(asked['seeds'])} seeds"
        for loss, curves in losses.items():
            first, last = quarters(curves["mismatch_kl"])
            kls = (first, last, quarters(curves["last_kl"])[1])
            rows.append((told, loss, *(f"{kl:.1e}" for kl in kls), number(quarters(curves["reward"])[1])))
    head = (
        *("of the sampler", "loss", "mismatch KL before the first step on a batch, first quarter", "last quarter"),
        *("at the last step, last quarter", "reward, last quarter"),
    )
    return grid(head, rows)


def mismatch() -> str:
    found = read("mismatch")
    rows = [
        (f"{kind}, {each['noise']:g}", *(f"{each[name]:.1e}" for name in ("free", "replayed")))
        for kind, points in found["routing"].items()
        for each in points
    ]
    head = ("mismatch KL by the noise of the routers", "the trainer's choice of experts", "the sampler's, replayed")
    return "\n\n".join((claims("mismatch"), drifted(found), grid(head, rows)))


def mismatch_followed() -> str:
    found, rows = read("mismatch_followed"), []
    for losses in found["drift"].values():
        for loss, curves in losses.items():
            grown = sorted(last / first for first, last in (quarters([run]) for run in curves["mismatch_kl"]))
            rows.append((loss, ", ".join(number(each) for each in grown)))
    by_seed = grid(("mismatch KL, last quarter / first", "of each seed"), rows)
    return "\n\n".join((claims("mismatch_followed"), drifted(found), by_seed))
