"""The audit log: one row for each thing that was done to keys, members, limits, sessions, projects and checkpoints.

`record` runs inside the transaction of the action, so there is no action without its row and no row without its action.
The database refuses to change rows, and the rows of an organisation are a chain: each holds a hash over itself and the
hash before it, so that a row that was changed, inserted or deleted is found (`verify`). Rows are chained and written at
the end of their transaction (`seal`, called by `store.database.db`), organisation by organisation in a fixed order,
under a lock of each: writers in several processes neither fork a chain nor deadlock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, insert, select, text
from sqlalchemy.orm import Session

from store.database.caller import caller
from store.tables import AuditEntry

#: Filters of the log, with the prefixes of the events that each shows.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": ("team_", "member_"),
    "organizations": ("key_", "organization_", "limits_", "quotas_"),
}

_PENDING = "audit"
_COVERED = ("org_id", "actor", "key_id", "ip", "request_id", "event", "target", "detail", "prev_hash")


def record(
    session: Session,
    *,
    org_id: str,
    key_id: int | None,
    event: str,
    target: str,
    detail: dict[str, Any] | None = None,
    at: datetime | None = None,
) -> None:
    """Note that the caller (`store.database.caller`) did `event`, named `<resource>_<action>`, to `target`: an id, or
    the tinker:// path of a checkpoint. `key_id` is the key used; if the server acts, the key that it acts for."""
    who = caller()
    entry = {
        "org_id": org_id,
        "at": at or datetime.now(UTC),
        "actor": f"key:{key_id}" if who.actor == "server" and key_id is not None else who.actor,
        "key_id": key_id,
        "ip": who.ip,
        "request_id": who.request_id,
        "event": event,
        "target": target,
        "detail": json.loads(json.dumps({**(detail or {}), **({"link_by": who.link_by} if who.link_by else {})})),
    }
    session.info.setdefault(_PENDING, []).append(entry)


def pending(session: Session) -> list[dict[str, Any]]:
    """The entries that `record` has noted in this session."""
    noted: list[dict[str, Any]] = session.info.get(_PENDING, [])
    return noted


def seal(connection: Connection, entries: list[dict[str, Any]]) -> None:
    """Chain and write the entries of a transaction that is about to commit."""
    for org_id, group in groupby(sorted(entries, key=lambda entry: entry["org_id"]), lambda entry: entry["org_id"]):
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:org, 7))"), {"org": org_id})
        newest = select(AuditEntry.hash).where(AuditEntry.org_id == org_id).order_by(AuditEntry.id.desc()).limit(1)
        last = connection.scalar(newest) or ""
        rows = []
        for entry in group:
            row = {**entry, "prev_hash": last}
            last = row["hash"] = chain_hash(row)
            rows.append(row)
        connection.execute(insert(AuditEntry), rows)


def chain_hash(entry: Mapping[str, Any]) -> str:
    """SHA-256 over an entry with its `prev_hash`, in a form that is the same on every database."""
    covered = {name: entry[name] for name in _COVERED} | {"at": entry["at"].astimezone(UTC).isoformat()}
    return hashlib.sha256(json.dumps(covered, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Verdict:
    """`head` is the last hash; kept elsewhere, it proves later that no row was cut off the end."""

    entries: int
    head: str
    problems: tuple[str, ...]


def verify(session: Session, org_id: str, known_head: str | None = None) -> Verdict:
    """Recompute the chain of an organisation. `known_head` is a hash that it must contain."""
    rows = list(_rows(session, org_id))
    problems, last = [], ""
    for values in rows:
        if values["prev_hash"] != last:
            problems.append(f"entry {values['id']} does not follow the one before it: rows were put in or taken out")
        if values["hash"] != chain_hash(values):
            problems.append(f"entry {values['id']} ({values['event']} {values['target']}) was changed")
        last = values["hash"]
    if known_head is not None and all(values["hash"] != known_head for values in rows):
        problems.append(f"the entry with hash {known_head} is gone: the end of the log was cut off")
    return Verdict(len(rows), last, tuple(problems))


def _rows(session: Session, org_id: str) -> Iterator[dict[str, Any]]:
    names = ("id", "at", "hash", *_COVERED)
    query = select(AuditEntry).where(AuditEntry.org_id == org_id).order_by(AuditEntry.id)
    for row in session.scalars(query.execution_options(yield_per=5000)):
        yield {name: getattr(row, name) for name in names}
