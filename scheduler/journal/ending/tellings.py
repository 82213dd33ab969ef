"""Noting that a client is told of a failure that optimizer steps depend on: whatever it sends of that run afterwards,
it sends knowing of the failure (`scheduler.order.gradients`)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from sqlalchemy import Update, update
from sqlalchemy.exc import OperationalError, TimeoutError as PoolTimeout

from scheduler.links.messages import STEPS_COUNT_ON, FailureTold
from store import logs
from store.database.db import Database
from store.tables import Operation

log = logging.getLogger(__name__)


def telling(database: Database, org_id: str, request_id: str) -> FailureTold | None:
    """In a thread, before the client is told: returns the message for the run's journal, or None if it knows
    already."""
    with database.read() as session:
        row = session.get(Operation, request_id)
    if row is None or row.org_id != org_id or row.state != "failed" or row.kind not in STEPS_COUNT_ON or row.fetched_at:
        return None
    told = FailureTold(row.lane, row.seq, datetime.now(UTC))
    try:
        database.write_now(lambda session: session.execute(_noted(request_id, told.at)))
    except (OperationalError, PoolTimeout) as error:  # the failure counts as untold after a restart
        log.warning(
            "operation %s: cannot note that its client knows of its failure: %s", request_id, logs.in_a_line(error)
        )
    return told


def _noted(request_id: str, at: datetime) -> Update:
    return update(Operation).where(Operation.id == request_id, Operation.fetched_at.is_(None)).values(fetched_at=at)
