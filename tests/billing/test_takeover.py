"""What was metered before there was a ledger is in it afterwards, to the nano-dollar."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from sqlalchemy import create_engine, text

from billing import usage
from billing.reconcile import check
from store.db import Database
from store.migrate import alembic_config
from store.tables import LedgerEntry, Wallet

ORGANISATION = text("INSERT INTO organisations (id, name, created_at) VALUES (:org, :org, '2026-01-01')")
EVENT = (
    "INSERT INTO usage_events (org_id, session_id, run_id, operation_id, kind, base_model, tokens, price_version, "
    "rate_uusd_per_mtok, amount_nusd, recorded_at) VALUES ('a', 's', {run}, '{op}', 'sample', 'm', 7, 'v', 400000, "
    "2800, '{at}')"
)


def test_old_usage_becomes_hours_an_entry_and_a_wallet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/weft.db"
    with create_engine(url).connect() as connection, connection.begin():
        command.upgrade(alembic_config(connection), "0005")
        for org in "ab":
            connection.execute(ORGANISATION, {"org": org})
        for op, run, at in (
            ("1", "'r'", "2026-10-01 10:59:59.5"),
            ("2", "'r'", "2026-10-01 11:00:00"),
            ("3", "NULL", "2026-10-02"),
        ):
            connection.execute(text(EVENT.format(op=op, run=run, at=at)))
    database = Database(url)
    database.migrate()
    assert check(database) == []
    with database.read() as session:
        assert [(row.run_id, row.quantity) for row in usage.summary(session, "a")] == [(None, 7), ("r", 14)]
        assert {w.org_id: (w.mode, w.balance_nusd) for w in session.query(Wallet)} == {
            "a": ("unlimited", -8400),
            "b": ("unlimited", 0),
        }
        assert [(e.type, e.amount_nusd, e.ref_type) for e in session.query(LedgerEntry)] == [
            ("usage", -8400, "migration")
        ]
    database.close()
