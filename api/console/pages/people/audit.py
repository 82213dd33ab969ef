"""Who did what to what, newest first, in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from api.console.lists import PageNumber, names, paged
from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.console.sentences import Called, Fact, sentence
from api.console.titles import run_of_path, run_titles
from api.http.access import declare
from api.state.service import ServiceDep
from store import tables
from store.database.audit import GROUPS
from store.tables import ApiKey, AuditEntry

router = console_router()

Group = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit", **declare(scope="public", limit="poll"))
async def audit(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    page_number: Annotated[PageNumber, Query(alias="page")] = 1,
    group: Group = "all",
) -> HTMLResponse:
    viewer.need("admin")

    def read(session: Session) -> dict[str, Any]:
        begins = (AuditEntry.event.startswith(prefix, autoescape=True) for prefix in GROUPS[group])
        query = select(AuditEntry).where(AuditEntry.org_id == viewer.org_id, or_(*begins))
        entries, pages = paged(session, query.order_by(AuditEntry.at.desc(), AuditEntry.id.desc()), page_number)
        called = called_in(session, viewer.org_id, entries)
        told = [sentence(Fact(each.actor, each.event, each.target, each.detail, called)) for each in entries]
        return {
            "entries": [(entry, text, json.dumps(entry.detail)) for entry, text in zip(entries, told, strict=True)],
            "pages": pages,
            "query": {"group": "" if group == "all" else group},
            "group": group,
            "groups": list(GROUPS),
        }

    return page(request, "audit.html", viewer, **await service.read(read))


def called_in(session: Session, org_id: str, entries: Sequence[AuditEntry]) -> Called:
    """Names for all ids in `entries`: each word is looked up as every kind of id that it may be."""
    words = {word for entry in entries for word in _words(entry)}
    runs = {run_of_path(word) or word for word in words}
    return Called(
        users={**_added(session, org_id, words), **_known(session, org_id, "user", words)},
        keys=_keys(session, org_id, words),
        projects={**_known(session, org_id, "project", words), "default": "default"},
        runs={run_id: title for run_id, title in run_titles(session, org_id, runs).items() if title != run_id},
        sessions=_sessions(session, org_id, words),
    )


def _words(entry: AuditEntry) -> Iterator[str]:
    """The words of an entry that may be ids."""
    for text in (entry.actor, entry.target, *entry.detail.values()):
        if isinstance(text, str | int):
            yield str(text)
            yield str(text).replace(":", " ").partition(" ")[2]


def _known(session: Session, org_id: str, what: Literal["user", "project"], words: set[str]) -> dict[str, str]:
    found = names(session, org_id, what, sorted(words))
    return {word: name for word, name in found.items() if word is not None and name != word}


def _keys(session: Session, org_id: str, words: set[str]) -> dict[str, str]:
    """Names of keys, by number and by prefix; a key without a name is called by its prefix."""
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 19]
    query = select(ApiKey.id, ApiKey.prefix, ApiKey.name).where(ApiKey.org_id == org_id)
    rows = session.execute(query.where(or_(ApiKey.prefix.in_(words), ApiKey.id.in_(numbers))))
    return {called: name or prefix for id, prefix, name in rows for called in (str(id), prefix)}


def _added(session: Session, org_id: str, words: set[str]) -> dict[str, str]:
    """Names of former members, as they were called when they were added."""
    query = select(AuditEntry.target, AuditEntry.detail).where(AuditEntry.org_id == org_id)
    query = query.where(AuditEntry.event == "member_added", AuditEntry.target.in_(words))
    return {user_id: detail["email"] for user_id, detail in session.execute(query) if detail.get("email")}


def _sessions(session: Session, org_id: str, words: set[str]) -> dict[str, str]:
    owner = tables.Session
    query = select(owner.id, owner.display_name, owner.user_metadata).where(owner.org_id == org_id, owner.id.in_(words))
    found = {id: metadata.get("name") or display for id, display, metadata in session.execute(query)}
    return {id: str(name) for id, name in found.items() if name}
