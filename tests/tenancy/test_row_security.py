"""Row-level security on a real PostgreSQL: a query that forgets the organisation still sees only the caller's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, inspect, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from api.paths import CheckpointPath
from api.server.serve import CannotServe, open_database
from api.who.lookup import readable_checkpoint
from api.who.principal import Principal
from billing.metering import storage
from migrations.upgrade import migrate
from scheduler.journal.ending.references import in_use
from store import tables
from store.database import audit, row_security
from store.database.caller import SERVER, Caller, acting_as, enter, unrestricted
from store.database.db import Database
from store.database.row_security import SERVER_ONLY
from store.people import organisations
from store.people.keys import new_key
from store.settings import Settings
from tests.rows import run_row, session_row
from tests.servers import PostgresServer

NOW = datetime(2026, 11, 20, tzinfo=UTC)
A, B = Caller("a", "key:1"), Caller("b", "key:2")

#: Tables of settings for the whole installation.
OF_NOBODY = {"wallet_defaults"}


def fill(database: Database) -> None:
    def write(session: Session) -> None:
        for org in ("a", "b"):
            session.add(tables.Organisation(id=org, name=org, created_at=NOW))
            session.flush()
            organisations.add_member(session, org, f"{org}@example.com", "owner")
            organisations.create_project(session, org, "p")
            new_key(session, org)

    database.write_now(write)


@pytest.fixture
def two(postgres_database: Database) -> Database:
    fill(postgres_database)
    return postgres_database


@pytest.fixture
def plain_login(postgres: PostgresServer) -> Iterator[Database]:
    """A server that logs in as an ordinary user who owns the tables; the policies bind this user all the same."""
    name = postgres.create()
    postgres.execute(
        f"DROP ROLE IF EXISTS plain; CREATE ROLE plain LOGIN CREATEROLE; GRANT ALL ON SCHEMA public TO plain; "
        f'ALTER DATABASE "{name}" OWNER TO plain',
        name,
    )
    for role in ("weft_app", "weft_service"):
        postgres.execute(
            f"DO $$ BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$; "
            f"GRANT {role} TO plain",
            name,
        )
    database = Database(postgres.url(name, "plain"))
    migrate(database)
    yield database
    database.close()
    postgres.drop(name)
    postgres.execute("DROP OWNED BY plain; DROP ROLE plain")


def org_ids(session: Session) -> set[str]:
    found = [session.scalars(select(tables.Organisation.id))]
    found += [session.scalars(select(t.org_id)) for t in (tables.ApiKey, tables.Project, tables.Membership)]
    return {org_id for rows in found for org_id in rows}


def test_a_query_without_a_filter_sees_the_callers_rows(two: Database) -> None:
    for who in (A, B):
        with acting_as(who), two.read() as session:
            assert org_ids(session) == {who.org_id}
            assert [user.email for user in session.scalars(select(tables.User))] == [f"{who.org_id}@example.com"]
    with two.read() as session:
        assert org_ids(session) == {"a", "b"}


def test_the_owner_of_the_tables_is_bound_too(plain_login: Database) -> None:
    fill(plain_login)
    with acting_as(A), plain_login.read() as session:
        assert org_ids(session) == {"a"}
    with plain_login.read() as session:
        assert org_ids(session) == {"a", "b"}
        assert audit.verify(session, "a").problems == ()


def test_a_login_that_makes_the_roles_itself_may_use_both(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since PostgreSQL 16 having made a role does not imply that one may use it."""
    roles = ("made_app", "made_service")
    monkeypatch.setattr(row_security, "APP_ROLE", roles[0])
    monkeypatch.setattr(row_security, "SERVICE_ROLE", roles[1])
    postgres.execute("CREATE ROLE maker LOGIN CREATEROLE")
    engine = create_engine(postgres.url("postgres", "maker"))
    try:
        for _ in range(2):
            with engine.begin() as connection:
                row_security.make_roles(connection)
        for role in roles:
            with engine.connect() as connection:
                assert connection.scalar(text(f"SELECT pg_has_role(current_user, '{role}', 'USAGE')"))
                assert connection.scalar(text("SELECT set_config('role', :role, true)"), {"role": role}) == role
    finally:
        engine.dispose()
        postgres.execute(f"DROP ROLE {', '.join(roles)}; DROP ROLE maker")


def test_a_login_that_may_not_make_the_roles_is_told_what_to_have_run(
    postgres: PostgresServer, migrated_postgres: str, tmp_path: Path
) -> None:
    """The roles exist, because `migrated_postgres` made them, but the login is a member of neither."""
    postgres.execute("CREATE ROLE humble LOGIN")
    name = postgres.create()
    postgres.execute(f'ALTER DATABASE "{name}" OWNER TO humble')
    try:
        settings = Settings(data_dir=tmp_path, database_url=postgres.url(name, "humble"))
        with pytest.raises(CannotServe, match=r"GRANT weft_app, weft_service TO humble \(docs/tenancy.md\)"):
            open_database(settings)
    finally:
        postgres.drop(name)
        postgres.execute("DROP ROLE humble")


def test_without_an_organisation_the_app_role_sees_nothing(two: Database) -> None:
    with two.read() as session:
        session.execute(text("SET LOCAL ROLE weft_app"))
        assert org_ids(session) == set()


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.add(tables.Project(org_id="b", id="x", name="x", created_at=NOW)) or s.flush(),
        lambda s: s.execute(update(tables.Project).values(org_id="b")),
    ],
    ids=["insert", "move"],
)
def test_nothing_is_written_for_another_organisation(two: Database, write: Callable[[Session], Any]) -> None:
    with acting_as(A), pytest.raises(DBAPIError, match="row-level security"):
        two.write_now(write)


def test_what_belongs_to_others_is_neither_changed_nor_deleted(two: Database) -> None:
    def write(session: Session) -> None:
        session.execute(update(tables.ApiKey).values(name="mine"))
        session.execute(delete(tables.Project))

    with acting_as(A):
        two.write_now(write)
    with two.read() as session:
        assert {key.org_id: key.name for key in session.scalars(select(tables.ApiKey))} == {"a": "mine", "b": ""}
        assert list(session.scalars(select(tables.Project.org_id))) == ["b"]


def test_what_is_spent_of_a_budget_is_of_its_organisation_alone(two: Database) -> None:
    """Its rows name the budget, and the budget names the organisation."""

    def write(session: Session) -> None:
        facts = {"scope": "org", "period": "total", "limit_nusd": 9, "hard": True, "alert_pcts": [], "created_at": NOW}
        session.add_all([tables.Budget(id=org, org_id=org, scope_id=org, **facts) for org in ("a", "b")])
        session.flush()
        session.add_all(
            [tables.BudgetPeriod(budget_id=org, start=NOW, spent_nusd=1, held_nusd=0) for org in ("a", "b")]
        )

    two.write_now(write)
    with acting_as(A):
        two.write_now(lambda session: session.execute(update(tables.BudgetPeriod).values(spent_nusd=7)))
        with two.read() as session:
            assert list(session.scalars(select(tables.BudgetPeriod.budget_id))) == ["a"]
    with two.read() as session:
        spent = session.scalars(select(tables.BudgetPeriod))
        assert {row.budget_id: row.spent_nusd for row in spent} == {"a": 7, "b": 1}


def test_works_of_one_transaction_are_restricted_each_by_itself(two: Database) -> None:
    """The writer puts works of many organisations into one transaction; a failed one leaves the restriction as is."""
    import asyncio

    def fail(session: Session) -> set[str]:
        raise KeyError

    async def as_caller(who: Caller | None, work: Callable[[Session], set[str]]) -> set[str]:
        if who is None:
            return await two.write(work)
        with acting_as(who):
            return await two.write(work)

    async def main() -> list[Any]:
        mixed = [(A, org_ids), (None, org_ids), (B, fail), (None, org_ids), (B, org_ids), (A, fail), (A, org_ids)]
        return await asyncio.gather(*(as_caller(who, work) for who, work in mixed), return_exceptions=True)

    seen = asyncio.run(main())
    assert [got for got in seen if not isinstance(got, KeyError)] == [{"a"}, {"a", "b"}, {"a", "b"}, {"b"}, {"a"}]


def test_the_restriction_is_lifted_where_it_is_said(two: Database) -> None:
    with acting_as(A), two.read() as session:
        with unrestricted(session):
            assert org_ids(session) == {"a", "b"}
        assert org_ids(session) == {"a"}


def test_every_table_has_its_policies(two: Database) -> None:
    with two.read() as session:
        schema = inspect(session.connection())
        bound = "SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity"
        forced = set(session.scalars(text(bound)))
        policies = set(session.scalars(text("SELECT tablename FROM pg_policies WHERE policyname = 'tenant'")))
        bare = set(schema.get_table_names()) - (forced & policies)
        assert bare == {*SERVER_ONLY, *OF_NOBODY}, (
            "a table with neither org_id nor a policy (store.database.row_security)"
        )
        session.execute(text("SET LOCAL ROLE weft_app"))
        for table in SERVER_ONLY:
            allowed = text("SELECT has_table_privilege(:table, 'SELECT')")
            assert not session.scalar(allowed, {"table": table}), table


def test_weights_that_lose_their_name_are_stored_by_who_is_on_them(two: Database) -> None:
    """Also if another organisation deletes what it had published, within its own request."""

    def write(session: Session) -> None:
        for org in ("a", "b"):
            session.add(session_row(org, NOW, f"s-{org}"))
            session.flush()
        session.add(run_row("a", NOW, "run-a", "s-a"))
        session.flush()
        facts: dict[str, Any] = {"name": "one", "ref": "weights/c", "size_bytes": 7, "user_metadata": {}}
        session.add(
            tables.Checkpoint(id="c", org_id="a", run_id="run-a", kind="weights", public=True, created_at=NOW, **facts)
        )
        for org in ("a", "b"):
            sampler: dict[str, Any] = {"model_path": "tinker://run-a/weights/one", "adapter_ref": "weights/c"}
            session.add(
                tables.Sampler(
                    id=f"s-{org}:sample:0", org_id=org, session_id=f"s-{org}", sampling_session_seq_id=0,
                    base_model="m", kind="snapshot", created_at=NOW, **sampler,
                )
            )  # fmt: skip

    def remove(session: Session) -> None:
        row = session.get_one(tables.Checkpoint, "c")
        storage.end(session, [row], NOW)
        session.delete(row)

    two.write_now(write)
    with acting_as(A):
        two.write_now(remove)
    with two.read() as session:
        spans = session.query(tables.StorageSpan).order_by(tables.StorageSpan.org_id)
        assert [(span.org_id, span.session_id, span.size_bytes) for span in spans] == [("a", "s-a", 7), ("b", "s-b", 7)]


@pytest.mark.parametrize("restricted", [False, True])
def test_who_deletes_what_another_copies_at_this_moment_leaves_the_files(two: Database, restricted: bool) -> None:
    """Each uses another replica; the copy is not committed yet when the owner deletes."""

    def checkpoint(id: str, org: str, run_id: str) -> tables.Checkpoint:
        facts: dict[str, Any] = {"name": "one", "ref": "weights/c", "size_bytes": 1, "user_metadata": {}}
        return tables.Checkpoint(id=id, org_id=org, run_id=run_id, kind="weights", public=True, created_at=NOW, **facts)

    def write(session: Session) -> None:
        for org in ("a", "b"):
            session.add(session_row(org, NOW, f"s-{org}"))
            session.flush()
            session.add(run_row(org, NOW, f"run-{org}", f"s-{org}"))
        session.flush()
        session.add(checkpoint("c", "a", "run-a"))

    two.write_now(write)
    needed: list[bool] = []

    def remove() -> None:
        with Session(two._read_engine) as session:
            session.delete(session.get_one(tables.Checkpoint, "c"))
            needed.append(in_use(session, "weights/c"))
            session.commit()

    with acting_as(B if restricted else SERVER), Session(two._read_engine) as copying:
        enter(copying)
        readable_checkpoint(copying, Principal("b", None), CheckpointPath("run-a", "weights", "one"), keep=True)
        copying.add(checkpoint("d", "b", "run-b"))
        copying.flush()
        removing = Thread(target=remove)
        removing.start()
        removing.join(0.3)
        copying.commit()
    removing.join()
    assert needed == [True]
