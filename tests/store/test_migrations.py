"""The revisions make exactly the tables of `store.tables`, and the triggers that SQLAlchemy does not know of."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, create_engine, delete, insert, inspect, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from billing.reports.reconcile import reconcile
from migrations import upgrade
from migrations.upgrade import InUse, alembic_config, head, migrate, revision_of
from scheduler.cluster import fence
from store import tables
from store.database.db import Database
from store.tables import Base, Budget, BudgetPeriod, Operation, Organisation, UsageEvent


def _event() -> UsageEvent:
    return UsageEvent(
        org_id="o",
        session_id="s",
        run_id="r",
        operation_id="op",
        kind="train",
        base_model="m",
        quantity=1,
        price_version="p",
        rate_uusd=1,
        amount_nusd=1,
        recorded_at=datetime.now(UTC),
    )


def test_tables_and_revisions_agree(database: Database) -> None:
    with create_engine(database.url).connect() as connection:
        command.check(alembic_config(connection))
        assert set(Base.metadata.tables) <= set(inspect(connection).get_table_names())


def test_defaults_and_checks_agree_too(database: Database, tmp_path: Path) -> None:
    """Alembic compares neither."""
    with create_engine(f"sqlite:///{tmp_path}/declared.db").begin() as declared:
        Base.metadata.create_all(declared)
        with create_engine(database.url).connect() as migrated:
            for table in Base.metadata.tables:
                assert _defaults_and_checks(migrated, table) == _defaults_and_checks(declared, table)


def _defaults_and_checks(connection: Connection, table: str) -> tuple[object, object]:
    schema = inspect(connection)
    columns, checks = schema.get_columns(table), schema.get_check_constraints(table)
    return {c["name"]: c["default"] for c in columns}, {c["name"]: c["sqltext"] for c in checks}


def test_downgrade_leaves_nothing(database: Database) -> None:
    with create_engine(database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]


@pytest.mark.parametrize("column", ["body", "result"])
def test_a_downgrade_is_refused_while_a_row_holds_a_step(any_database: Database, column: str) -> None:
    """Runs are rebuilt from their steps: a run without one would be lost."""
    step = {
        "id": "op", "org_id": "o", "session_id": "s", "lane": "run", "seq": 1, "kind": "optim_step", "base_model": "m",
        "state": "done", "tokens": 0, "body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": datetime.now(UTC),
    }  # fmt: skip

    def write(session: Session) -> None:
        session.add(Organisation(id="o", name="o", created_at=datetime.now(UTC)))
        session.flush()
        session.execute(insert(Operation), [step | {column: "{}"}])

    any_database.write_now(write)
    with create_engine(any_database.url).connect() as connection, pytest.raises(RuntimeError, match="1 operations"):
        command.downgrade(alembic_config(connection), "0004")
    with any_database.read() as session:
        assert getattr(session.get_one(Operation, "op"), column) == "{}"


def test_migrating_again_keeps_the_rows(database: Database) -> None:
    database.write_now(lambda s: s.add(Organisation(id="o", name="o", created_at=datetime.now(UTC))))
    migrate(database)
    with database.read() as session:
        assert session.get(Organisation, "o") is not None


def test_two_processes_may_migrate_at_once(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path}/weft.db") for _ in range(4)]
    failures: list[BaseException] = []

    def run(database: Database) -> None:
        try:
            migrate(database)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for database in databases:
        database.close()


def test_tables_change_only_after_the_servers_that_share_them_have_ended(
    any_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A new server migrates at its start, but not beside old ones: their code may not know what it writes."""
    before = inspect(create_engine(any_database.url)).get_columns("operations")
    with create_engine(any_database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), "0004")
    now = datetime.now(UTC)
    assert any_database.write_now(lambda session: fence.take(session, "old", now))
    with pytest.raises(InUse, match="revision 0004, and servers that share it are at work: stop all"):
        migrate(any_database)
    assert revision_of(create_engine(any_database.url)) == "0004"
    any_database.write_now(lambda session: fence.give_up(session, "old", datetime.now(UTC)))
    with caplog.at_level("INFO", "migrations.upgrade"):
        migrate(any_database)
    assert f"the database went from revision 0004 to {head()}" in caplog.text
    assert [column["name"] for column in inspect(create_engine(any_database.url)).get_columns("operations")] == [
        column["name"] for column in before
    ]


class Wrong(datetime):
    """The clock of a machine that was set wrong."""

    off = timedelta()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + cls.off


@pytest.mark.parametrize("led", [True, False])
def test_whether_servers_are_at_work_does_not_depend_on_the_clock_of_the_migrating_machine(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch, led: bool
) -> None:
    """The database's clock decides whether the lease holds: a clock ahead would take a leader for dead, a clock behind
    would wait for one that is gone."""
    with create_engine(postgres_database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), "0004")
    monkeypatch.setattr(tables, "LEADS_S", 60.0)
    now = datetime.now(UTC)
    assert postgres_database.write_now(lambda session: fence.take(session, "old", now))
    if not led:
        postgres_database.write_now(lambda session: fence.give_up(session, "old", now))
    monkeypatch.setattr(Wrong, "off", timedelta(hours=1 if led else -1))
    monkeypatch.setattr(upgrade, "datetime", Wrong, raising=False)
    with pytest.raises(InUse) if led else nullcontext():
        migrate(postgres_database)


def test_a_lease_taken_by_a_clock_years_ahead_does_not_stop_a_migration(postgres_database: Database) -> None:
    with create_engine(postgres_database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), "0004")
    ahead = datetime.now(UTC) + timedelta(days=3650)
    assert postgres_database.write_now(lambda session: fence.take(session, "old", ahead))
    migrate(postgres_database)


def test_budgets_whose_key_had_leading_zeros_limit_that_key_after_the_migration(any_database: Database) -> None:
    """A budget for key "01" limited nothing, as key 1 is named "1". Of budgets for both names the stricter stays."""
    with create_engine(any_database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), "0005")
    now = datetime.now(UTC)
    facts = {"org_id": "o", "alert_pcts": [], "created_at": now, "scope": "key"}
    given = [
        ("1", "01", "month", 50, True), ("2", "01", "total", 60, True), ("3", "2", "month", 90, False),
        ("4", "002", "month", 80, True), ("5", "02", "month", 70, False), ("6", "3", "total", 40, True),
    ]  # fmt: skip

    def write(session: Session) -> None:
        session.add(Organisation(id="o", name="o", created_at=now))
        session.flush()
        for name, key, period, limit, hard in given:
            session.add(Budget(id=name, scope_id=key, period=period, limit_nusd=limit, hard=hard, **facts))
        session.flush()
        session.add(BudgetPeriod(budget_id="1", start=datetime(1999, 1, 1, tzinfo=UTC), spent_nusd=7, held_nusd=7))
        for number, (key_id, amount, at) in enumerate(
            ((1, 5, now), (1, 6, datetime(2020, 2, 29, tzinfo=UTC)), (2, 8, now))
        ):
            event = _event()
            event.operation_id, event.key_id, event.amount_nusd, event.accepted_at = str(number), key_id, amount, at
            session.add(event)

    any_database.write_now(write)
    migrate(any_database)
    with any_database.read() as session:
        budgets = [(b.id, b.scope_id, b.period, b.limit_nusd, b.hard) for b in session.scalars(select(Budget))]
        periods = [(p.budget_id, p.start.year, p.spent_nusd) for p in session.scalars(select(BudgetPeriod))]
        assert not [drift for drift in reconcile(session) if "budget" in drift.what]
    assert sorted(budgets) == [
        ("1", "1", "month", 50, True), ("2", "1", "total", 60, True), ("3", "2", "month", 80, True),
        ("6", "3", "total", 40, True),
    ]  # fmt: skip
    assert sorted(periods) == [("1", 2020, 6), ("1", now.year, 5), ("2", 1970, 11)]


def test_migrates_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database(f"sqlite:///{tmp_path}/weft.db")
    migrate(database)
    database.close()


@pytest.mark.parametrize(
    "change", [update(UsageEvent).values(amount_nusd=0), delete(UsageEvent)], ids=["update", "delete"]
)
def test_usage_events_are_append_only(database: Database, change: object) -> None:
    database.write_now(lambda s: s.add(Organisation(id="o", name="o", created_at=datetime.now(UTC))))
    database.write_now(lambda s: s.add(_event()))
    with pytest.raises(IntegrityError, match="usage_events is append-only"):
        database.write_now(lambda s: s.execute(change))  # type: ignore[call-overload]
    with database.read() as session:
        assert [row.amount_nusd for row in session.query(UsageEvent)] == [1]
