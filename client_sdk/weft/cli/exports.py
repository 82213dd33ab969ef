"""Commands about adapters on disk: `weft download`, and `weft verify`, which checks that one loads correctly on this
machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from weft.cli.shell import Failed, Server, main
from weft.errors import WeftError
from weft.exports.layout import REFERENCE, Layout


@main.command()
@click.argument("path")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Folder to write (default: the checkpoint's name)."
)
@click.option(
    "--for",
    "layout",
    type=click.Choice(["peft", "vllm", "tinker"]),
    default="peft",
    show_default=True,
    help="The program that is to load it.",
)
@click.option("--leave-out-unembedding", is_flag=True, help="For vLLM: leave out the trained part of the unembedding.")
@click.option(
    "--no-reference",
    is_flag=True,
    help="Do not fetch the log-probabilities (billed as prefill) that `weft verify` compares with.",
)
@click.pass_obj
def download(
    server: Server, path: str, folder: Path | None, layout: Layout, leave_out_unembedding: bool, no_reference: bool
) -> None:
    """Fetch the adapter at PATH (tinker://...) into a folder that stock PEFT loads."""
    from weft.cli.reference import fetch_reference
    from weft.transport.download import whole
    from weft.wire.rest import parse_checkpoint_path

    target = folder or Path(parse_checkpoint_path(path).name)
    fetching = server().download_checkpoint(path, target, layout, leave_out_unembedding=leave_out_unembedding)
    files = fetching.result()
    for file in files:
        click.echo(f"{file}  {file.stat().st_size:,} bytes")
    if target / "verify.py" not in files or no_reference:
        return
    try:
        with server.service() as service:
            reference = fetch_reference(service, path)
        with whole(target / REFERENCE) as written:
            written.write(json.dumps(reference).encode() + b"\n")
    except (WeftError, OSError) as error:
        click.echo(f"no {REFERENCE}, so nothing to verify with: {error}", err=True)
        return
    click.echo(f"{target / REFERENCE}; check: weft verify {target} --base BASE_MODEL_FOLDER")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--base", help="Folder or hub name of the base model (default: the name under which it is served).")
def verify(folder: Path, base: str | None) -> None:
    """Compare the log-probabilities of the adapter in FOLDER, as peft and transformers load it here, with the
    server's."""
    from weft.exports import verify as verifying

    try:
        right, sentence = verifying.verify(folder, base)
    except verifying.CannotTry as error:
        raise Failed(str(error), 2) from None
    click.echo(sentence)
    if not right:
        raise SystemExit(1)
