"""What the commands of `weftd` share: which data folder is meant, its settings and database, and how an operator's
mistake is reported."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from store import logs

if TYPE_CHECKING:
    from store.blobs.contract import Blobs
    from store.database.db import Database
    from store.settings import Settings


#: Files by which a data folder in use is recognised, even if its database is lost.
_OURS = ("weft.db", "weft.db-commits", "blobs")


class Finite(click.FloatRange):
    """A number in a range, neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Place(NamedTuple):
    """The data that a command works on: `--data-dir` and `--config` as given."""

    data_dir: Path | None
    config: Path | None


def where(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a `Place`, which the command gets first."""

    @wraps(command)
    def at(data_dir: Path | None, config: Path | None, **given: Any) -> None:
        command(Place(data_dir, config), **given)

    folder = click.option("--data-dir", type=click.Path(path_type=Path), help="Folder with the service's data.")
    config = click.option("--config", type=click.Path(path_type=Path), help="Settings as TOML (docs/operating.md).")
    return folder(config(at))


def settings_of(place: Place, **overrides: Any) -> Settings:
    from store.load_settings import load_settings
    from store.settings import SettingsError

    if place == (None, None):
        refuse("--data-dir is missing: name the folder with the service's data")
    try:
        return load_settings(place.config, data_dir=place.data_dir, **overrides)
    except SettingsError as error:
        refuse(error)


def say_as(settings: Settings, program: str) -> None:
    """Log as `program`, in the way that the settings say."""
    logs.configure(settings.logs.format, settings.logs.level, program)


def is_new(settings: Settings) -> bool:
    """Whether no server, and no `weftd`, has used this data folder yet."""
    return not settings.database_url and not any((settings.data_dir / name).exists() for name in _OURS)


@contextmanager
def database_of(place: Place, may_be_new: bool = False) -> Iterator[Database]:
    """The database of a data folder that exists, unless it `may_be_new`: a mistyped path must not create an empty one.
    Errors about people (PeopleError) become one line, too."""
    from sqlalchemy.exc import OperationalError

    from api.server.serve import CannotServe, open_database
    from store.database.sure import Unsure
    from store.people.organisations import PeopleError

    settings = settings_of(place)
    if is_new(settings) and not may_be_new:
        refuse(f"{settings.data_dir} is no data folder of Weft: name the one that `weftd serve` was given")
    try:
        database = open_database(settings)
    except CannotServe as error:
        refuse(error)
    try:
        yield database
    except PeopleError as error:
        refuse(error)
    except OperationalError as error:  # a disk or server that accepts nothing, or nothing from this user
        says = f"the database of {settings.data_dir} does not do it: {logs.in_a_line(error)}"
        refuse(says, 1 if settings.database_url else code_of(error))
    except Unsure as error:
        refuse(
            f"the database of {settings.data_dir} was lost while it did it, and may or may not have done it: look "
            f"(the ledger, the audit log) before you do it again: {error}"
        )
    finally:
        database.close()


def blobs_to_change(settings: Settings, database: Database) -> Blobs:
    """The blobs, to be changed. Refused if they belong to another service."""
    from store.blobs.opening import blobs_of
    from store.blobs.owner import claim_prefix
    from store.settings import SettingsError

    try:
        claim_prefix(settings, database)
        return blobs_of(settings)
    except (SettingsError, OSError) as error:
        refuse(error)


def refuse(why: str | Exception, code: int | None = None) -> NoReturn:
    """End the command with one line for the operator, and the exit code; without one, that of the error, 2 for text."""
    with suppress(OSError):
        click.echo(f"weftd: {why}", err=True)
    sys.exit(code_of(why) if code is None else code)


def code_of(why: str | Exception) -> int:
    """The exit code for an error: 2 for a mistake of the operator, 1 for what may go well later."""
    from store.blobs.room import may_pass

    return getattr(why, "exit_code", 1 if isinstance(why, Exception) and may_pass(why) else 2)
