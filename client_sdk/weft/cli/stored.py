"""Commands about what is stored: checkpoints, and the trace of a session."""

from __future__ import annotations

from pathlib import Path

import click

from weft.cli import tables
from weft.cli.shell import RunParameter, Server, as_json, main, show


@main.command()
@click.option("--run", "run_id", type=RunParameter(), help="Only this run, by id or name.")
@click.option("--limit", default=100, show_default=True, help="How many, newest first.")
@as_json
@click.pass_obj
def checkpoints(rest: Server, run_id: str | None, limit: int, json_: bool) -> None:
    """Saved weights."""
    client = rest()
    listed = client.list_checkpoints(run_id) if run_id else client.list_user_checkpoints(limit)
    show(listed.result(), json_, tables.checkpoints)


@main.command()
@click.argument("path")
@click.pass_obj
def publish(rest: Server, path: str) -> None:
    """Let everybody on the server load the checkpoint at PATH."""
    rest().publish_checkpoint_from_tinker_path(path).result()
    click.echo(f"{path} is public")


@main.command()
@click.argument("path")
@click.pass_obj
def unpublish(rest: Server, path: str) -> None:
    """Make the checkpoint at PATH private again."""
    rest().unpublish_checkpoint_from_tinker_path(path).result()
    click.echo(f"{path} is private")


@main.command("set-ttl")
@click.argument("path")
@click.option("--seconds", type=int, help="Expire this many seconds from now: an hour to ten years.")
@click.option("--never", is_flag=True, help="Keep it for ever.")
@click.pass_obj
def set_ttl(rest: Server, path: str, seconds: int | None, never: bool) -> None:
    """Set when the checkpoint at PATH expires, or that it never does."""
    if (seconds is None) != never:
        raise click.UsageError("give either --seconds or --never")
    rest().set_checkpoint_ttl_from_tinker_path(path, seconds).result()
    click.echo(f"{path} " + ("never expires" if never else f"expires in {seconds:,} s"))


@main.command()
@click.argument("paths", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.pass_obj
def delete(rest: Server, paths: tuple[str, ...], yes: bool) -> None:
    """Delete the checkpoints at PATHS. There is no undo."""
    from weft.wire.rest import parse_checkpoint_path

    for path in paths:
        parse_checkpoint_path(path)
    if not yes:
        click.confirm(f"Delete {', '.join(paths)}?", abort=True)
    client = rest()
    for path in paths:
        client.delete_checkpoint_from_tinker_path(path).result()
        click.echo(f"{path} is deleted")


@main.command()
@click.argument("session_id", metavar="SESSION")
@click.option("--to", "file", type=click.Path(dir_okay=False, path_type=Path), help="File; default: SESSION.pftrace.")
@click.pass_obj
def trace(rest: Server, session_id: str, file: Path | None) -> None:
    """Fetch a trace of SESSION's operations, to be opened in ui.perfetto.dev."""
    import asyncio

    from weft.transport.download import download_files

    url = rest().export_session_trace(session_id).result()
    target = file if file and file.name else Path(f"{session_id}.pftrace")
    asyncio.run(download_files({target.name: url}, target.parent))
    click.echo(str(target))
