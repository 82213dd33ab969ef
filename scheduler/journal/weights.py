"""The share of an organisation in the fair order, as its row has it."""

from __future__ import annotations

import time

from sqlalchemy.exc import OperationalError

from scheduler.order.expected_cost import ExpectedCosts
from store import tables
from store.database.db import Transactions


def expected_costs_of(database: Transactions) -> ExpectedCosts:
    """By the weights in this database."""

    def weight(org_id: str) -> int:
        try:
            with database.read() as session:
                row = session.get(tables.Organisation, org_id)
                return row.weight if row is not None else 1
        except OperationalError:  # what was accepted is queued, whether or not the database is there just now
            return 1

    return ExpectedCosts(weight, time.monotonic)
