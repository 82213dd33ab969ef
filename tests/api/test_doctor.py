"""`weftd doctor` on a faulty machine or data folder: it names the fault and what to do; exit code 1."""

from __future__ import annotations

import json
import shutil
import sqlite3
import types
import uuid
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import weftd
from api.commands import doctor as command
from api.doctor import machine, stores
from api.doctor.models import prices
from migrations.upgrade import head
from scheduler.links.loading import announced
from scheduler.links.redis_queue import RedisQueue
from store.blobs.bucket import Bucket
from store.database import leaps
from store.database.db import Database
from store.settings import Settings
from store.tables import JobRun
from tests.servers import OwnStore, free_port, redis_server
from workers.model.tiny import TINY_NAME, TINY_PATH

Patch = pytest.MonkeyPatch


@pytest.fixture
def folder(tmp_path: Path, migrated_sqlite: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir(mode=0o700)
    shutil.copy(migrated_sqlite, made / "weft.db")
    return made


def examined(folder: Path) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(weftd, ["doctor", "--json", "--data-dir", str(folder)])
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, {finding["about"]: finding for finding in found}


@pytest.fixture
def without_torch(monkeypatch: Patch) -> None:
    """Without torch: only one test asks about it, and it takes seconds to load."""
    checks = tuple(check for check in command.CHECKS if check is not machine.computing)
    monkeypatch.setattr(command, "CHECKS", checks)


def test_everything_is_looked_at_and_what_is_missing_is_named(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("WEFT_TRAINER__DEVICE", "cuda:7")  # the eighth GPU
    result = CliRunner().invoke(weftd, ["doctor", "--data-dir", str(folder)])
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    areas = [
        "disk",
        "permissions",
        "open",
        "server",
        "database",
        "clocks",
        "prices",
        "model",
        "engines",
        "kernels",
        "gpu",
    ]
    assert {line.split()[1] for line in lines} == set(areas), result.stdout
    assert [line.split()[:2] for line in lines if line.startswith("wrong")] == [["wrong", "gpu"]]
    assert "trainer.device is cuda:7, and torch" in result.stdout
    assert "-> install torch for this GPU's driver" in result.stdout
    assert result.exit_code == 1


@pytest.mark.usefixtures("without_torch")
def test_a_healthy_folder_and_one_that_is_not_there_yet(folder: Path, tmp_path: Path) -> None:
    code, found = examined(folder)
    assert (code, {finding["state"] for finding in found.values()}) == (0, {"ok"})
    assert found["database"]["says"] == f"weft.db is whole, at revision {head()}"
    assert examined(tmp_path / "later")[0] == 0
    assert not (tmp_path / "later").exists()


@pytest.mark.usefixtures("without_torch")
def test_the_object_store_is_looked_at_and_nothing_is_written(
    folder: Path, object_store: OwnStore, monkeypatch: Patch
) -> None:
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    for name, value in (object_store.environment | {"WEFT_BLOB_URL": url}).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert examined(folder)[1]["blobs"]["says"] == f"{url} is empty: the first start begins it"
    Bucket(url).check()
    assert examined(folder)[1]["blobs"]["says"] == f"{url} answers"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    code, found = examined(folder)
    assert (code, found["blobs"]["state"]) == (1, "wrong")
    assert "AWS_SECRET_ACCESS_KEY: it does not belong" in found["blobs"]["says"]


def _newer(folder: Path, _patch: Patch) -> None:
    with closing(sqlite3.connect(folder / "weft.db")) as writing, writing:
        writing.execute("update alembic_version set version_num = '0999'")


def _damaged(folder: Path, _patch: Patch) -> None:
    with (folder / "weft.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)


def _lost(folder: Path, _patch: Patch) -> None:
    (folder / "weft.db-commits").write_text("90\n")


def _cut_model(folder: Path, patch: Patch) -> None:
    model = shutil.copytree(TINY_PATH, folder / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    patch.setenv("WEFT_MODELS__MINE", f'"{model}"')


def _no_model(_folder: Path, patch: Patch) -> None:
    patch.setenv("WEFT_MODELS__MINE", '"/nowhere"')


def _no_room(_folder: Path, patch: Patch) -> None:
    usage = shutil.disk_usage("/")
    patch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=100 << 20))


def _no_folder(folder: Path, _patch: Patch) -> None:
    shutil.rmtree(folder)
    folder.touch()


def _wrong_time(_folder: Path, patch: Patch) -> None:
    patch.setattr(stores, "time", types.SimpleNamespace(time=lambda: __import__("time").time() - 30))


def _no_redis(_folder: Path, patch: Patch) -> None:
    patch.setenv("WEFT_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")


def _no_postgres(_folder: Path, patch: Patch) -> None:
    patch.setenv("WEFT_DATABASE_URL", f"postgresql+psycopg://u:p@127.0.0.1:{free_port()}/x")


def _no_vllm(_folder: Path, patch: Patch) -> None:
    patch.setenv("WEFT_GENERATOR__ENGINE", "vllm")
    patch.setenv("WEFT_GENERATOR__VLLM__PROGRAM", '"/nowhere/vllm"')


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("harm", "about", "says", "remedy"),
    [
        (_newer, "database", "is of revision 0999, and this weftd knows", "use the version of Weft that made it"),
        (_damaged, "database", "weft.db is damaged", "weftd restore"),
        (_lost, "database", "has lost commits", "weftd restore"),
        (_cut_model, "model", "model.safetensors", "download it again"),
        (_no_model, "model", "/nowhere", "weftd model check"),
        (_no_room, "disk", "100 MiB free", "free some room"),
        (_no_folder, "disk", "Not a directory", "give the user that runs weftd a folder"),
        (_wrong_time, "clocks", "that of the file system is +", "chrony"),
        (_no_redis, "redis", "does not answer", "WEFT_REDIS_URL"),
        (_no_postgres, "database", "does not answer", "WEFT_DATABASE_URL"),
        (_no_vllm, "engines", "there is no vLLM at /nowhere/vllm", "docs/vllm.md"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_what_is_wrong_is_named_with_its_remedy(
    folder: Path, monkeypatch: Patch, harm: Callable[[Path, Patch], None], about: str, says: str, remedy: str
) -> None:
    harm(folder, monkeypatch)
    code, found = examined(folder)
    assert code == 1
    assert found[about]["state"] == "wrong"
    assert says in found[about]["says"]
    assert remedy in found[about]["remedy"]


@pytest.mark.usefixtures("without_torch")
def test_what_may_become_wrong_is_a_warning(folder: Path, monkeypatch: Patch) -> None:
    folder.chmod(0o755)
    with redis_server("--maxmemory-policy", "allkeys-lru") as url:
        monkeypatch.setenv("WEFT_REDIS_URL", url)
        code, found = examined(folder)
    warned = {about for about, finding in found.items() if finding["state"] == "warning"}
    assert (code, warned) == (0, {"permissions", "redis", "workers", "jobs"})
    assert found["workers"]["remedy"] == "start one: weftd worker generator"
    assert found["redis"]["remedy"] == "CONFIG SET maxmemory-policy noeviction"
    assert "Redis" in found["clocks"]["says"]


def test_a_generator_that_loads_its_model_is_told_and_missed_by_nobody(folder: Path) -> None:
    with redis_server() as url, announced(url, "generator", [TINY_NAME]):
        settings = Settings(data_dir=folder, redis_url=url)
        while not (found := list(stores.workers(settings)))[0].says.startswith("generator-"):
            continue
        assert [finding.state for finding in found] == ["ok"]
        assert f" loads {TINY_NAME}, for 0 s now" in found[0].says


def test_a_generator_of_another_version_is_named(folder: Path) -> None:
    with redis_server() as url, closing(RedisQueue(url, "samples2:other")) as theirs:
        theirs.lease("generator-1", [TINY_NAME], 1, 60)
        other, missed = stores.workers(Settings(data_dir=folder, redis_url=url))
    assert [other.state, missed.state] == ["warning", "warning"]
    assert "generator-1 is of another version" in other.says


@pytest.mark.usefixtures("without_torch")
def test_a_login_that_row_level_security_does_not_bind(
    folder: Path, postgres_database: Database, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("WEFT_DATABASE_URL", postgres_database.url)
    code, found = examined(folder)
    assert (code, found["login"]["state"]) == (0, "warning")
    assert found["database"]["says"].startswith("PostgreSQL ")
    assert "the database" in found["clocks"]["says"]


@pytest.mark.parametrize(
    ("leapt_s", "state", "says"),
    [(None, "ok", "they run"), (60, "warning", "nothing expires"), (3700, "ok", "they run")],
)
def test_a_clock_that_leapt_is_told_while_jobs_wait(
    database: Database, tmp_path: Path, leapt_s: int | None, state: str, says: str
) -> None:
    now = datetime.now(UTC)
    result = leaps.Noted(now, now - timedelta(seconds=leapt_s) if leapt_s is not None else None).row()
    row = JobRun(name=leaps.HEARTBEAT, succeeded_at=now, result=result)
    database.write_now(lambda session: session.add(row))
    settings = Settings(data_dir=tmp_path, database_url=database.url, redis_url="redis://127.0.0.1:1/0")
    (found,) = stores.jobs(settings)
    assert (found.state, says in found.says) == (state, True)


def test_a_model_that_costs_what_any_other_does_is_named(tmp_path: Path) -> None:
    about = {
        finding.state: finding
        for finding in prices(Settings(data_dir=tmp_path, models={"Qwen/Qwen3.8-27B": TINY_PATH}))
    }
    assert set(about) == {"ok", "warning"}
    assert about["warning"].says.startswith("Qwen/Qwen3.8-27B: no price of its own")
    assert "prices.models" in about["warning"].remedy
