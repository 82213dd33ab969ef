"""A key is shown once. Afterwards it is in no log, no file and no error, whatever is done with it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import supervised

pytestmark = pytest.mark.server
PREFIX = "/api/v1"


def test_no_secret_is_written_anywhere(own_weftd: Callable[..., Weftd]) -> None:
    server = own_weftd()
    secret, wrong = server.key("acme"), "tml-" + "A" * 8 + "_" + "B" * 43
    service = tinker.ServiceClient(base_url=server.url, api_key=secret)
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    run.forward_backward(supervised(), "cross_entropy").result()
    run.save_state("one").result()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": secret}) as http:
        token = http.post(f"{PREFIX}/auth/token").json()["jwt"]
        assert http.get(f"{PREFIX}/weft/keys").status_code == 200
        signed_in = http.post("/console/login", data={"key": secret})
        assert secret not in signed_in.text
        replies = [
            http.get(f"{PREFIX}/weft/usage", params={"key": secret}),  # a client that puts it into an address
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
