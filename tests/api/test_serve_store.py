"""A server that cannot use its object store does not start, and says in one line what to set."""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from api.cli import weftd
from api.server.serve import CannotServe, check_store, claim_store, open_database
from store.blobs.bucket import OWNER, Bucket
from store.blobs.opening import blobs_of
from store.people.secret import secret_of
from store.settings import Settings
from tests.servers import OwnStore
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.peft_format import write_peft
from workers.model.adapters.shape import AdapterShape
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

SECRET = "the same for all replicas, and long"


def test_replicas_on_a_bucket_need_one_secret(
    object_store: OwnStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    place = {"data_dir": tmp_path, "blob_url": object_store.url}
    check_store(Settings(**place))
    check_store(Settings(**place, redis_url="redis://x", server_secret=SECRET))
    with pytest.raises(CannotServe, match="WEFT_SERVER_SECRET"):
        check_store(Settings(**place, redis_url="redis://x"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(CannotServe, match=r"AWS_SECRET_ACCESS_KEY: .*SignatureDoesNotMatch"):
        check_store(Settings(**place))


def test_a_prefix_has_one_service(object_store: OwnStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    ours, theirs = (Settings(data_dir=tmp_path / name, blob_url=url) for name in ("ours", "theirs"))
    for settings in (ours, theirs):
        check_store(settings)
    with closing(open_database(ours)) as first, closing(open_database(theirs)) as second:
        claim_store(ours, first)
        claim_store(ours, first)
        with pytest.raises(CannotServe, match=rf"{url} belongs to .*ours/weft.db since 20.* not to .*theirs/weft.db"):
            claim_store(theirs, second)
        claim_store(ours, first)
        claim_store(Settings(data_dir=tmp_path / "theirs", blob_url=f"{url}/2"), second)
        Bucket(url).delete([OWNER])
        claim_store(theirs, second)
    with closing(open_database(ours)) as first, pytest.raises(CannotServe, match="belongs to"):
        claim_store(ours, first)  # it remembers which service it is


def test_a_second_service_changes_nothing_by_a_command_either(
    object_store: OwnStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    monkeypatch.setenv("WEFT_BLOB_URL", url)
    ours = Settings(data_dir=tmp_path / "ours", blob_url=url)
    check_store(ours)
    with closing(open_database(ours)) as database:
        claim_store(ours, database)
    blobs = blobs_of(ours)
    blobs.put("ops/o/body", b"asked")
    adapter = Adapter.init(AdapterShape(read_config("tiny", TINY_PATH), 4), seed=1)
    arrays = {name: view.numpy() for name, view in adapter.views.items()}
    write_peft(tmp_path / "adapter", arrays, base_model="tiny", rank=4, alpha=4)

    def run(folder: str, *command: str) -> Result:
        return CliRunner().invoke(weftd, [*command, "--data-dir", str(tmp_path / folder)])

    assert run("theirs", "org", "create", "acme").exit_code == 0
    for command in (
        ("jobs", "run", "sweep_files"),
        ("jobs", "worker"),
        ("org", "delete", "acme", "--confirm", "acme"),
        ("adapter", "import", "--org", "acme", str(tmp_path / "adapter")),
    ):
        refused = run("theirs", *command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), (command, refused.output)
        assert f"{url} belongs to the service of the database" in refused.stderr
    assert blobs.get("ops/o/body") == b"asked"
    assert run("ours", "jobs", "run", "reconcile").exit_code == 0


def test_a_secret_that_is_set_is_in_no_dump_and_makes_one_key(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, server_secret=SECRET)
    assert SECRET not in f"{settings!r} {settings.model_dump(mode='json')}"
    assert secret_of(SECRET) == secret_of(SECRET) != secret_of(SECRET + "!")
