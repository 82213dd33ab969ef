"""`weftd plan`: what serving a model takes of a machine's memory, and the settings that follow from it; `weftd model`:
what a model folder is, before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path

import click

from api.commands.places import Finite, refuse


@click.command()
@click.option(
    "--model",
    "paths",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Folder of a model; may be repeated.",
)
@click.option(
    "--gpu-gib", type=Finite(0, 1 << 20, min_open=True), help="Memory of each GPU (default: that of the GPU here)."
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, help="GPUs over which the trainer spreads the base.")
@click.option("--tenants", type=click.IntRange(min=1), default=16, help="Runs in training at the same time.")
@click.option("--rank", type=click.IntRange(min=1), default=32, help="Rank of their adapters, which train all parts.")
@click.option("--context", type=click.IntRange(min=1), help="Longest sequence (generator.context_tokens).")
@click.option("--config", type=click.Path(path_type=Path), help="Settings as TOML; the plan changes none of them.")
def plan(
    paths: tuple[Path, ...],
    gpu_gib: float | None,
    gpus: int,
    tenants: int,
    rank: int,
    context: int | None,
    config: Path | None,
) -> None:
    """Print how memory is divided and the settings that fit; or, with exit code 2, the setting that does not fit. Reads
    only config.json of the model."""
    from api.server.workers.memory_plan import devices_here, plan_on
    from api.server.workers.vllm_places import options_of, started_here, vllm_table
    from store.load_settings import load_settings
    from store.settings import SettingsError
    from workers.model.card import UnsupportedModel, config_card
    from workers.model.planning.plan import Device, DoesNotFit
    from workers.model.planning.vllm_options import Layout

    try:
        settings = load_settings(config, data_dir=Path())
        if context is not None:
            generator = settings.generator.model_copy(update={"context_tokens": context})
            settings = settings.model_copy(update={"generator": generator})
        cards = {str(path): config_card(path.name, path) for path in paths}  # several folders may have one name
        size = int((gpu_gib or 0) * 2**30)
        devices = [Device(f"GPU of {gpu_gib:g} GiB", size, gpus)] if gpu_gib else devices_here(settings)
        for number, device in enumerate(devices):
            if number:
                click.echo()
            for line in plan_on(device, settings, cards, tenants=tenants, rank=rank).lines():
                click.echo(line)
        if gpu_gib and started_here(settings):
            for card in cards.values():
                click.echo()
                each = Device(f"GPU of {gpu_gib:g} GiB", size, Layout.of(options_of(settings)).gpus)
                click.echo(vllm_table(settings, card, each))
    except (SettingsError, UnsupportedModel, DoesNotFit) as error:
        refuse(str(error))
    except ValueError as error:
        refuse(f"model at {', '.join(map(str, paths))}: {error}")


@click.group()
def model() -> None:
    """Model folders."""


@model.command()
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Dtype of weights and cache."
)
@click.argument("path", type=click.Path(path_type=Path))
def check(path: Path, dtype: str) -> None:
    """Print the family of the model in PATH, which parts are trained and how much memory it takes; or, with exit code
    2, what is not supported. `serve` refuses the same models for the same reasons."""
    from workers.model.card import UnsupportedModel, read_card
    from workers.model.planning.check import check_model

    try:
        found = check_model(read_card(path.name, path), dtype)
    except ValueError as error:  # among them a config.json that is no JSON
        refuse(str(error) if isinstance(error, UnsupportedModel) else f"model at {path}: {error}")
    for line in found.lines():
        click.echo(line)
