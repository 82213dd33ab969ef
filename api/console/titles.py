"""What people call runs and checkpoints: by the name in a run's metadata, or in its session's, before any id."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import Session

from api.errors import Invalid
from api.paths import parse_path
from store import tables
from store.tables import Run

#: Where metadata may have a name, in the order in which one is taken.
NAME_FIELDS = ("name", "run_name", "title")
#: Ids in one question to the database.
_AT_A_TIME = 500


def title_of(run: Run, session: tables.Session) -> str:
    """What a run is called: by its metadata, by its session's, or not at all ("")."""
    for metadata in (run.user_metadata, session.user_metadata):
        for name in NAME_FIELDS:
            if isinstance(metadata.get(name), str) and metadata[name].strip():
                return str(metadata[name])
    return session.display_name or ""


def run_titles(session: Session, org_id: str, run_ids: Iterable[str]) -> dict[str, str]:
    """What the runs with these ids are called; one without a name, or that is gone, is called by its id."""
    wanted = sorted(set(run_ids))
    found = dict(zip(wanted, wanted, strict=True))
    for start in range(0, len(wanted), _AT_A_TIME):
        query = select(Run, tables.Session).join(tables.Session, tables.Session.id == Run.session_id)
        part = query.where(Run.org_id == org_id, Run.id.in_(wanted[start : start + _AT_A_TIME]))
        found.update({run.id: title_of(run, owner) or run.id for run, owner in session.execute(part)})
    return found


def with_owner(query: Select[Run]) -> Select[Run]:
    """`query` with each run's session beside it, for `called`."""
    return query.join(tables.Session, tables.Session.id == Run.session_id)


def called(text: str) -> ColumnElement[bool]:
    """Of runs `with_owner`: those whose name or id has `text` in it."""
    owner = tables.Session
    names = [column[field].as_string() for column in (Run.user_metadata, owner.user_metadata) for field in NAME_FIELDS]
    return or_(*(place.icontains(text, autoescape=True) for place in (Run.id, owner.display_name, *names)))


def checkpoint_title(path: str, titles: dict[str, str]) -> str:
    """A path of a checkpoint as people say it: "step-200 of gsm8k-grpo". What is no path stays as it is."""
    try:
        parsed = parse_path(path, "path")
    except Invalid:
        return path
    return f"{parsed.name} of {titles.get(parsed.run_id, parsed.run_id)}"


def run_of_path(path: str) -> str | None:
    """The run of a checkpoint's path; None for what is no path."""
    try:
        return parse_path(path, "path").run_id
    except Invalid:
        return None
