"""What people call runs and checkpoints: the name in the run's metadata, else in its session's, else the id."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import Session

from api.errors import Invalid
from api.paths import parse_path
from store import tables
from store.tables import Run

#: Keys of the metadata that may hold a name; the first one counts.
NAME_FIELDS = ("name", "run_name", "title")
#: How many ids one query asks for.
_AT_A_TIME = 500


def title_of(run: Run, session: tables.Session) -> str:
    """The name of a run: from its metadata, or its session's; "" if neither has one."""
    for metadata in (run.user_metadata, session.user_metadata):
        for name in NAME_FIELDS:
            if isinstance(metadata.get(name), str) and metadata[name].strip():
                return str(metadata[name])
    return session.display_name or ""


def run_titles(session: Session, org_id: str, run_ids: Iterable[str]) -> dict[str, str]:
    """The names of the runs with these ids; a run without a name, or a deleted one, is called by its id."""
    wanted = sorted(set(run_ids))
    found = dict(zip(wanted, wanted, strict=True))
    for start in range(0, len(wanted), _AT_A_TIME):
        query = select(Run, tables.Session).join(tables.Session, tables.Session.id == Run.session_id)
        part = query.where(Run.org_id == org_id, Run.id.in_(wanted[start : start + _AT_A_TIME]))
        found.update({run.id: title_of(run, owner) or run.id for run, owner in session.execute(part)})
    return found


def with_owner(query: Select[Run]) -> Select[Run]:
    """`query` joined with each run's session, for `called`."""
    return query.join(tables.Session, tables.Session.id == Run.session_id)


def called(text: str) -> ColumnElement[bool]:
    """Restricts a query made by `with_owner` to runs whose name or id contains `text`."""
    owner = tables.Session
    names = [column[field].as_string() for column in (Run.user_metadata, owner.user_metadata) for field in NAME_FIELDS]
    return or_(*(place.icontains(text, autoescape=True) for place in (Run.id, owner.display_name, *names)))


def checkpoint_title(path: str, titles: dict[str, str]) -> str:
    """A checkpoint's path as people say it: "step-200 of gsm8k-grpo". Any other text stays as it is."""
    try:
        parsed = parse_path(path, "path")
    except Invalid:
        return path
    return f"{parsed.name} of {titles.get(parsed.run_id, parsed.run_id)}"


def run_of_path(path: str) -> str | None:
    """The run in a checkpoint's path; None for any other text."""
    try:
        return parse_path(path, "path").run_id
    except Invalid:
        return None
