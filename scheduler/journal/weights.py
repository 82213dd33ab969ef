"""The fair share of an organisation, from its row."""

from __future__ import annotations

import time

from sqlalchemy.exc import OperationalError

from scheduler.order.expected_cost import ExpectedCosts
from store import tables
from store.database.db import Transactions


def expected_costs_of(database: Transactions) -> ExpectedCosts:
    """Expected costs that read the organisations' weights from this database."""

    def weight(org_id: str) -> int:
        try:
            with database.read() as session:
                row = session.get(tables.Organisation, org_id)
                return row.weight if row is not None else 1
        except OperationalError:  # accepted operations are queued even while the database is away
            return 1

    return ExpectedCosts(weight, time.monotonic)
