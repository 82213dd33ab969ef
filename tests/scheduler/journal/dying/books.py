"""What must hold for a database's books at any moment, in plain SQL over a connection of its own; and an oracle that
does one operation after the other."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import psycopg

#: Whether an operation or usage event, `{of}`, counts towards budget b.
_COUNTS = (
    "{of}.org_id = b.org_id AND CASE b.scope WHEN 'org' THEN b.scope_id = {of}.org_id "
    "WHEN 'project' THEN b.scope_id = {of}.project_id ELSE b.scope_id = CAST({of}.key_id AS VARCHAR) END"
)
#: Each query finds rows that are wrong.
WRONG = {
    "a balance is not the sum of its ledger": "SELECT org_id FROM wallets w WHERE balance_nusd <> "
    "(SELECT COALESCE(SUM(amount_nusd), 0) FROM ledger_entries l WHERE l.org_id = w.org_id)",
    "what is held is not what is queued": "SELECT org_id FROM wallets w WHERE held_nusd <> "
    "(SELECT COALESCE(SUM(hold_nusd), 0) FROM operations o WHERE o.org_id = w.org_id AND state = 'queued')",
    "more is held than there is": "SELECT org_id FROM wallets WHERE mode <> 'unlimited' "
    "AND balance_nusd + overdraft_nusd < held_nusd",
    "an end without an outcome, or an outcome without an end": "SELECT id FROM operations "
    "WHERE (state = 'queued') <> (finished_at IS NULL) OR (state = 'done') <> (result IS NOT NULL) "
    "OR (state = 'failed') <> (error IS NOT NULL)",
    "usage of what has not ended": "SELECT operation_id FROM usage_events LEFT JOIN operations o "
    "ON o.id = operation_id WHERE o.id IS NULL OR o.state = 'queued'",
    "done and not billed": "SELECT id FROM operations o WHERE state = 'done' AND NOT EXISTS "
    "(SELECT 1 FROM usage_events WHERE operation_id = o.id)",
    "an entry is not the sum of its events": "SELECT ref_id FROM ledger_entries WHERE type = 'usage' "
    "AND -amount_nusd <> (SELECT COALESCE(SUM(amount_nusd), 0) FROM usage_events WHERE settlement = ref_id)",
    "events without an entry": "SELECT operation_id FROM usage_events e WHERE NOT EXISTS "
    "(SELECT 1 FROM ledger_entries WHERE type = 'usage' AND ref_id = e.settlement AND org_id = e.org_id)",
    "hours are not the sums of their events": "SELECT id FROM organisations a WHERE "
    "(SELECT COALESCE(SUM(amount_nusd), 0) FROM usage_hourly h WHERE h.org_id = a.id) <> "
    "(SELECT COALESCE(SUM(amount_nusd), 0) FROM usage_events e WHERE e.org_id = a.id)",
    "a budget holds other than what is queued": "SELECT id FROM budgets b WHERE "  # noqa: S608
    "(SELECT COALESCE(SUM(held_nusd), 0) FROM budget_periods WHERE budget_id = b.id) <> "
    "(SELECT COALESCE(SUM(hold_nusd), 0) FROM operations o WHERE o.state = 'queued' AND "
    + _COUNTS.format(of="o")
    + ")",
    "a budget has spent other than what was used": "SELECT id FROM budgets b WHERE "  # noqa: S608
    "(SELECT COALESCE(SUM(spent_nusd), 0) FROM budget_periods WHERE budget_id = b.id) <> "
    "(SELECT COALESCE(SUM(amount_nusd), 0) FROM usage_events e WHERE " + _COUNTS.format(of="e") + ")",
    "a hard budget is passed": "SELECT b.id FROM budgets b JOIN budget_periods p ON p.budget_id = b.id "
    "WHERE hard AND spent_nusd + held_nusd > limit_nusd",
}


def wrong(address: str) -> dict[str, Any]:
    """The wrong rows, by what is wrong with them, at one moment. `address`: a file of SQLite, or a conninfo."""
    found = {what: rows for what, rows in zip(WRONG, at_once(address, *WRONG.values()), strict=True)}
    return {what: rows for what, rows in found.items() if rows}


def at_once(address: str, *queries: str) -> list[list[Any]]:
    if "=" not in address:
        with closing(sqlite3.connect(address, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            return [connection.execute(query).fetchall() for query in queries]
    with psycopg.connect(address) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return [connection.execute(query).fetchall() for query in queries]  # type: ignore[arg-type]


@dataclass
class Limit:
    """A budget over all time."""

    org: str
    scope: str
    scope_id: str
    limit: int
    hard: bool
    spent: int = 0
    held: int = 0


@dataclass
class Books:
    """Wallets and budgets as they are if operations come one after the other, each in a transaction of its own.
    `may_owe`: None for no limit."""

    balance: dict[str, int]
    may_owe: dict[str, int | None]
    limits: list[Limit]
    held: dict[str, int] = field(default_factory=dict)

    def _limits(self, org: str, project: str | None, key: int | None) -> list[Limit]:
        scopes = {("org", org), ("project", project), ("key", str(key))}
        return [each for each in self.limits if each.org == org and (each.scope, each.scope_id) in scopes]

    def accept(self, org: str, project: str | None, key: int | None, amount: int) -> bool:
        owe, held = self.may_owe[org], self.held.get(org, 0)
        left = [] if owe is None else [self.balance[org] + owe - held]
        limits = self._limits(org, project, key)
        left += [each.limit - each.spent - each.held for each in limits if each.hard]
        if any(amount > each or each <= 0 for each in left):
            return False
        self.held[org] = held + amount
        for each in limits:
            each.held += amount
        return True

    def end(self, org: str, project: str | None, key: int | None, held: int, cost: int) -> None:
        self.held[org] -= held
        self.balance[org] -= cost
        for each in self._limits(org, project, key):
            each.held -= held
            each.spent += cost
