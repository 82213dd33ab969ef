"""What many tests need: a migrated database, a blob store, real servers."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import uuid
from collections.abc import Generator, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from httpx._transports import default as transports

from migrations.upgrade import migrate
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.migrated import database_in
from tests.order import ByFile, place
from tests.search import load_profile
from tests.servers import OwnStore, PostgresServer, postgres_server, redis_server

if TYPE_CHECKING:
    from store.blobs.bucket import Bucket

# Before torch is imported: spinning threads would take the cores from other processes that share them. A test that
# needs several threads sets their number.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

#: Processes that tests start import what the tests import: this checkout's packages, whatever is installed.
CHECKOUT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(CHECKOUT), str(CHECKOUT / "client_sdk"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

load_profile()

#: Where one of these is installed, transformers takes its kernels for recurrent layers while it imports them (5.17 and
#: later), and on a CPU they fail. Our decoder is compared with the formulas that transformers has in torch.
KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h")


def import_references() -> None:
    """Import transformers' recurrent layers as if there were no KERNELS; ours are imported where they are asked for."""
    hidden = [name for name in KERNELS if find_spec(name) is not None]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    for family in RECURRENT if hidden else ():
        import_module(f"transformers.models.{family}.modeling_{family}")
    for name in hidden:
        del sys.modules[name]


import_references()

# A client of httpx loads all certificates: 40 ms of processor time, and hardly any client here needs them.
transports.create_ssl_context = cache(transports.create_ssl_context)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays, so it is not looked through for circles, neither meanwhile nor later; and what comes
    then no more often than by a server (api/server/serve.py)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20)
        gc.enable()


# After pytest has looked, twice, for unused objects: not through all that was collected. But before the interpreter is
# taken apart, or nanobind reports all that triton has made as a leak.
atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each core, and one more: while a test waits for a time to pass, another has its core."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False  # else the file with most tests would go first
    return ByFile(config, log)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables and no rows, to be copied."""
    folder = tmp_path_factory.mktemp("migrated")
    database_in(folder).close()
    return folder / "weft.db"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = database_in(tmp_path)
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
    migrate(database)
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
    """Either database; for all tests about tenancy and money."""
    name = "database" if request.param == "sqlite" else "postgres_database"
    database: Database = request.getfixturevalue(name)
    return database


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One Redis for all tests: use keys of your own."""
    with redis_server() as url:
        yield url


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnStore]:
    """One object store for all tests: use prefixes of your own."""
    own = OwnStore(tmp_path_factory.mktemp("object-store"))
    yield own
    own.stop()


@pytest.fixture
def bucket(object_store: OwnStore, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket."""
    from store.blobs.bucket import Bucket

    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    made = Bucket(f"{object_store.url}/{uuid.uuid4().hex}")
    made.check()
    return made


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs")
