"""`weftd simulate`: the scheduler on a virtual clock, with many tenants and any number of GPUs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from api.commands.places import Finite, refuse


@click.command()
@click.option(
    "--tenants",
    "counts",
    type=click.IntRange(1, 10_000),
    multiple=True,
    help="How many tenants; repeat for several rows.",
)
@click.option("--gpus", type=click.IntRange(2, 100_000), default=256, show_default=True)
@click.option("--trainer-share", type=Finite(0.01, 0.99), default=0.3, show_default=True, help="Fraction of the GPUs.")
@click.option("--slots", type=click.IntRange(1, 4096), default=64, show_default=True, help="Sequences per replica.")
@click.option("--hours", type=Finite(0.01, 1000), default=8.0, show_default=True, help="Simulated hours.")
@click.option(
    "--after", type=Finite(0, 1000), default=0.0, show_default=True, help="Hours at the beginning that are not counted."
)
@click.option("--gpu-hour", type=Finite(0, 1e6), default=1.59, show_default=True, help="Dollars per GPU-hour.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the rows into a .png or .svg (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Say how to divide the GPUs for this model (a folder with config.json).",
)
@click.option(
    "--gpu-gib", type=Finite(1, 1 << 20), default=141.0, show_default=True, help="With --model: memory of each GPU."
)
@click.option(
    "--busiest",
    type=Finite(1, 100_000),
    default=1.0,
    show_default=True,
    help="With --model: work of the busiest owner of experts, as a multiple of the average.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Instead, compare the simulator with a real run of the embedded service; exit code 1 if they differ.",
)
def simulate(
    counts: tuple[int, ...],
    gpus: int,
    trainer_share: float,
    slots: int,
    hours: float,
    after: float,
    gpu_hour: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
    model: Path | None,
    gpu_gib: float,
    busiest: float,
    check: bool,
) -> None:
    """Simulate tenants on one cluster and print utilisation, waits, throughput and price: in fair order, in order of
    arrival, and each tenant alone.

    With --model: compute instead how to divide the GPUs between trainers and generators for that many --tenants."""
    if plot is not None and plot.suffix not in (".png", ".svg"):  # refused before a minute's work
        refuse("--plot: name a file that ends in .png or .svg")
    if check:
        _check(as_json)
        return
    if model is not None:
        asked = {"slots": slots, "hours": hours, "seed": seed, "busiest": busiest}
        _divide(model, int(gpu_gib * 2**30), gpus, counts[0] if counts else 16, gpu_hour, asked, as_json)
        return
    from scheduler.simulator import report
    from scheduler.simulator.cluster import Cluster

    cluster = replace(Cluster.of(gpus, trainer_share), slots=slots, gpu_hour_usd=gpu_hour)
    counts = counts or (1, 4, 16, 64)
    playing = report.compare(cluster, counts, hours, seed, after)
    length = len(report.ALONE) + 2 * len(counts)
    with click.progressbar(playing, length, "Simulating", file=sys.stderr) as told:
        rows = list(told)
    click.echo(json.dumps([asdict(row) for row in rows]) if as_json else report.table(rows))
    if plot is not None:
        try:
            report.plot(rows, plot)
        except ImportError:
            refuse("--plot needs matplotlib: pip install matplotlib")


def _divide(
    model: Path, gpu_bytes: int, gpus: int, tenants: int, usd: float, asked: dict[str, Any], as_json: bool
) -> None:
    from api.server.workers.gpu_shapes import shape_of
    from scheduler.simulator import division
    from scheduler.simulator.workloads import tenants_of
    from workers.model.card import UnsupportedModel, config_card
    from workers.model.planning.plan import DoesNotFit

    try:
        shape = shape_of(config_card(model.name, model), gpu_bytes, asked["slots"])
    except (UnsupportedModel, DoesNotFit) as error:
        refuse(str(error))
    except ValueError as error:
        refuse(f"model at {model}: {error}")
    if shape.ranks + shape.gpus > gpus:
        refuse(
            f"--gpus {gpus}: one trainer takes {shape.ranks} GPUs of {gpu_bytes / 2**30:g} GiB, and one generator "
            f"{shape.gpus}"
        )
    loads, gpu = tenants_of(tenants), division.Gpu(hour_usd=usd)
    found = list(division.divisions(shape, gpu, gpus, loads, **asked))
    owners = sorted({one.cluster.ranks for one in found if one.shard == "experts"})
    below = {ranks: division.faster_below_tokens(shape, gpu, ranks, tenants, asked["busiest"]) for ranks in owners}
    if as_json:
        rows = [asdict(one.cluster) | {"shard": one.shard, "trained_per_s": one.trained_per_s} for one in found]
        told = {"best": found.index(division.best(found)), "experts_faster_below_tokens": below, "divisions": rows}
        click.echo(json.dumps(told))
        return
    click.echo(division.table(found, gpus))
    for ranks, tokens in below.items():
        click.echo(f'{ranks} ranks, {tenants} runs in a pass: shard = "experts" is faster below {tokens:,.0f} tokens')


def _check(as_json: bool) -> None:
    """Occupancy of slots as predicted and as measured; exit code 1 when any is off by more than the tolerance."""
    from api.commands.planning import rehearsal

    found = []
    for case in rehearsal.check():
        found.append(case)
        if not as_json:
            click.echo(
                f"{case.tenants} x {case.load}: slots busy {case.measured:.1%}, predicted {case.predicted:.1%}, "
                f"off by {case.off:.1%} (try {case.tries} of at most {rehearsal.TRIES})"
            )
    if as_json:
        click.echo(json.dumps([asdict(case) | {"off": case.off} for case in found]))
    if not all(case.holds for case in found):
        click.echo(f"weftd: a prediction is off by more than {rehearsal.TOLERANCE:.0%}", err=True)
        sys.exit(1)
