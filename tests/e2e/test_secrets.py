"""A key is shown once. Afterwards it is in no log, no file and no error, whatever is done with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command
from tests.e2e.data import supervised

pytestmark = pytest.mark.server
PREFIX = "/api/v1"


def test_no_secret_is_written_anywhere(own_weftd: Callable[..., Weftd]) -> None:
    server = own_weftd()
    secret, wrong = server.key("acme"), "tml-" + "A" * 8 + "_" + "B" * 43
    service = tinker.ServiceClient(base_url=server.url, api_key=secret)
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    run.forward_backward(supervised(), "cross_entropy").result()
    path = run.save_state("one").result().path
    with httpx.Client(base_url=server.url, headers={"X-API-Key": secret}) as http:
        token = http.post(f"{PREFIX}/auth/token").json()["jwt"]
        assert http.get(f"{PREFIX}/weft/keys").status_code == 200
        borrower = {"X-API-Key": server.key("globex")}
        opened = http.post(f"{PREFIX}/create_session", json={"tags": [], "sdk_version": "1"}, headers=borrower).json()
        lent = {"session_id": opened["session_id"], "path": path, "optimizer": False, "weights_access_token": secret}
        load = http.post(f"{PREFIX}/load_weights", json=lent | {"model_seq_id": 0}, headers=borrower).json()
        loaded = http.post(f"{PREFIX}/retrieve_future", json={"request_id": load["request_id"]}, headers=borrower)
        assert loaded.json()["path"] == path, loaded.text
        signed_in = http.post("/console/login", data={"key": secret})
        assert secret not in signed_in.text
        replies = [
            http.get(f"{PREFIX}/weft/usage", params={"key": secret}),  # put into an address by mistake
            http.get(f"{PREFIX}/training_runs/{secret}"),
            http.post(f"{PREFIX}/forward", content=secret.encode(), headers={"content-type": "application/json"}),
            http.get(f"{PREFIX}/weft/usage", headers={"X-API-Key": wrong}),
            httpx.get(f"{server.url}{PREFIX}/weft/usage", headers={"Authorization": f"Bearer {token}x"}),
        ]
    assert [reply.status_code for reply in replies[1:]] == [404, 422, 401, 401]
    for other in (replies[0], replies[3], replies[4]):
        assert secret not in other.text
        assert wrong not in other.text
    assert server.stop() == 0
    needles = [value.encode() for value in (secret, secret.rpartition("_")[2], wrong.rpartition("_")[2], token)]
    for file in server.data_dir.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(needle in content for needle in needles), f"{file.name} holds a secret"


def test_other_users_of_the_machine_read_nothing(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    """Whatever umask the server is started with."""
    before = os.umask(0)
    try:
        server = own_weftd()
        made = weftd_command("key", "create", "--data-dir", tmp_path / "new", "--org", "acme")
        assert made.returncode == 0, made.stderr
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key("acme"))
    finally:
        os.umask(before)
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    run.forward_backward(supervised(), "cross_entropy").result()
    run.save_state("one").result()
    ours = {server.data_dir / "stderr.log"}  # written by this test's process, not by weftd
    there = [tmp_path / "new", *(path for path in server.data_dir.rglob("*") if path not in ours)]
    open_to_others = {str(path): oct(path.lstat().st_mode) for path in there if path.lstat().st_mode & 0o077}
    assert not open_to_others
    assert {"weft.db", "weft.db-wal", "blobs"} <= {path.name for path in there}
    assert any(path.is_file() and "weights" in path.parts for path in there)
