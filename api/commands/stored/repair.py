"""`weftd repair`: go on after a loss that cannot be undone."""

from __future__ import annotations

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.places import Place, database_of, refuse, settings_of, where
from scheduler.journal.ending.references import broken_because
from store import tables
from store.database.commit_mark import CommitMark

_LOST = "the server's database has lost what was committed last, and with it operations of this run"


@click.command()
@where
def repair(place: Place) -> None:
    """Accept that the database has lost commits, and end the runs that may have lost operations.

    Use it only if the server does not start because of lost commits and the right files cannot be restored. Ends every
    live run; its user is told why, and which checkpoint is its last. Prints the runs."""
    from api.server.serve import CannotServe, only_one

    settings = settings_of(place)
    mark = CommitMark.of(settings.effective_database_url)
    if mark is None:
        refuse("this service's database looks after itself; there is nothing to repair")
    if not settings.data_dir.joinpath("weft.db").is_file():
        refuse(f"there is no database in {settings.data_dir}: put it back from a backup, or serve another folder")
    try:
        with only_one(settings.data_dir):
            mark.accept()
            mark.close()
            with database_of(place) as database, database.read() as session:
                live = session.scalars(select(tables.Run).filter_by(state="live", broken=None)).all()
                why = {run.id: broken_because(session, run.id, _LOST) for run in live}
                database.write_now(lambda writing: _end(writing, why))
            for run_id in why:
                click.echo(run_id)
    except CannotServe as error:
        refuse(error)


def _end(session: Session, why: dict[str, str]) -> None:
    for run_id, words in why.items():
        session.get_one(tables.Run, run_id).broken = words
