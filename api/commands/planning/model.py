"""`weftd model`: what a model folder is, before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path

import click

from api.commands.places import refuse


@click.group()
def model() -> None:
    """Model folders."""


@model.command()
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Of weights and cache.")
@click.argument("path", type=click.Path(path_type=Path))
def check(path: Path, dtype: str) -> None:
    """Print the family of the model in PATH, what is trained of it and what memory it takes; or, with exit code 2, what
    is not supported of it. `serve` refuses the same models for the same reasons."""
    from workers.model.card import UnsupportedModel, read_card
    from workers.model.planning.check import check_model

    try:
        found = check_model(read_card(path.name, path), dtype)
    except ValueError as error:  # a config.json that is no JSON among them
        refuse(str(error) if isinstance(error, UnsupportedModel) else f"model at {path}: {error}")
    for line in found.lines():
        click.echo(line)
