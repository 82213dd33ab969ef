"""What all replicas together have queued and in flight, which each of them checks before it accepts something.

In flight is asked of the database, which is exact: an operation of a run that is in flight anywhere is always let in,
or what a run waits for could be kept out by what waits behind it. The backlog is what every replica says of its own in
Redis, about once a second: meanwhile all can let in as much as the limit leaves. What a replica says is forgotten when
it is silent, so a crash leaks nothing; what it had accepted counts no more.
"""

from __future__ import annotations

import json

from sqlalchemy import ColumnElement, and_, case, distinct, func, select

from scheduler.journal.accepting.in_flight import Elsewhere, Work
from scheduler.links.board import Board
from scheduler.order.operations import SAMPLE
from store import tables
from store.database.db import Database

_KEY = "{weft:backlogs}"
#: A replica silent for this long is taken for gone.
SILENT_S = 10

_row = tables.Operation


class BacklogBoard(Board):
    """The place in Redis where each replica publishes how much it has queued."""

    def __init__(self, url: str) -> None:
        super().__init__(url, _KEY)

    def exchange(self, replica: str, own: dict[str, tuple[int, int]]) -> list[dict[str, tuple[int, int]]]:
        """Publish this replica's backlog; returns those of the others."""
        return [json.loads(said) for said in self.put(replica, json.dumps(own).encode(), SILENT_S)]


def in_flight(database: Database, scope: str, id: str, work: Work | None) -> Elsewhere:
    """What all replicas have in flight, by the rows of the database."""
    mine = _row.state == "queued", _owner(scope, id)
    unit = case((_row.kind == SAMPLE, _row.id), else_=_row.lane)
    with database.read() as session:
        if work is not None and work.kind != SAMPLE:
            same = select(_row.id).where(*mine, _row.lane == work.lane, _row.kind != SAMPLE)
            if session.scalar(same.limit(1)) is not None:
                return Elsewhere(has=True)
        return Elsewhere(session.scalar(select(func.count(distinct(unit))).where(*mine)) or 0)


def _owner(scope: str, id: str) -> ColumnElement[bool]:
    """The condition for operations that count for `scope` `id` (`scheduler.journal.accepting.in_flight`)."""
    if scope == "key":
        return _row.key_id == int(id)
    if scope == "project":
        org_id, _, project_id = id.partition(" ")
        return and_(_row.org_id == org_id, _row.project_id == project_id)
    return _row.org_id == id
