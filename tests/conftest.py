"""What many tests need: a migrated database, a blob store, real servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.blobs import Blobs
from store.db import Database
from tests.servers import PostgresServer, postgres_server, redis_server


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables and no rows, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "weft.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


@pytest.fixture
def database(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Database]:
    path = shutil.copy(migrated_sqlite, tmp_path / "weft.db")
    database = Database(f"sqlite:///{path}")
    yield database
    database.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresServer) -> str:
    """A database with all tables and no rows, to be copied."""
    name = postgres.create()
    database = Database(postgres.url(name))
    database.migrate()
    database.close()
    return name


@pytest.fixture
def postgres_database(postgres: PostgresServer, migrated_postgres: str) -> Iterator[Database]:
    name = postgres.create(migrated_postgres)
    database = Database(postgres.url(name))
    yield database
    database.close()
    postgres.drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest) -> Database:
    """The test runs on both; for all that concerns tenancy and money."""
    name = "database" if request.param == "sqlite" else "postgres_database"
    database: Database = request.getfixturevalue(name)
    return database


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One Redis for all tests: use keys of your own."""
    with redis_server() as url:
        yield url


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")
