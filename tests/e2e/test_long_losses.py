"""A custom loss that takes too long, on a real server: its user is told, and other tenants notice nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import supervised
from tests.e2e.production import Production
from tests.e2e.test_crashes import client, fingerprint, train
from tests.e2e.test_production import own_store, production  # noqa: F401
from tests.waiting import until

pytestmark = pytest.mark.server


def sorting(logprobs: Any, weights: Any) -> Any:
    """A loss that takes milliseconds, where the server of this test allows less than one."""
    for _ in range(240):
        logprobs = logprobs.sort(dim=0)[0]
    return (logprobs * weights).sum(), {}


def fails(run: Any, loss_id: str) -> str:
    with pytest.raises(tinker.RequestFailedError) as error:
        run.forward_backward(supervised(), "custom", {"loss_id": loss_id}).result(timeout=120)
    return str(error.value)


def ended(server: Weftd) -> int:
    """How often a trainer has ended itself."""
    return server.log().count("trainer was killed by SIGALRM")


def rows(server: Weftd, question: str) -> list[Any]:
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        return db.execute(question).fetchall()


def test_a_loss_that_takes_too_long_fails_alone_and_for_good(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[trainer]\nloss_limit_s = 1e-4\n")
    server = own_weftd("--config", str(config))
    service = client(server)
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    expected = train(calm, 4), fingerprint(calm)
    assert ended(server) == 0

    attacker = tinker.ServiceClient(base_url=server.url, api_key=server.key("other"))
    loss = attacker.create_custom_loss(sorting, {"logprobs": 1, "weights": 1}).result()
    hostile = attacker.create_lora_training_client(BASE_MODEL, rank=4).result()
    neighbour = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    with ThreadPoolExecutor() as pool:
        told = pool.submit(fails, hostile, str(loss.loss_id))
        found = train(neighbour, 4), fingerprint(neighbour)
        assert "custom loss: it took longer than the" in told.result()
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    until(lambda: ended(server) == 1)
    [(state, category)] = rows(server, "select state, error_category from operations where error like 'custom loss:%'")
    assert (state, category) == ("failed", "user")
    [(tokens,)] = rows(
        server,
        "select quantity from usage_events where kind = 'train' and operation_id = "
        "(select id from operations where error like 'custom loss:%')",
    )
    assert tokens == sum(datum.model_input.length for datum in supervised()[:2]), "its first slice, by its work"

    server.kill()
    server.start()
    np.testing.assert_array_equal(fingerprint(neighbour), expected[1])
    hostile.forward(supervised(), "cross_entropy").result(timeout=120)  # the run itself is still usable
    assert ended(server) == 1


@pytest.mark.timeout(600)
def test_over_redis_a_trainer_ends_itself_and_the_one_that_stands_by_goes_on(production: Production) -> None:  # noqa: F811
    """Nobody restarts a worker on another machine: it ends itself, and the leader knows whose loss was to blame."""
    production.config.write_text(production.config.read_text().replace("[trainer]", "[trainer]\nloss_limit_s = 1e-4"))
    trainers = [production.worker("trainer") for _ in range(2)]
    (url,) = production.serve(1)
    service = tinker.ServiceClient(base_url=url, api_key=production.key())
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=240)
    expected = train(calm, 2), fingerprint(calm)
    attacker = tinker.ServiceClient(base_url=url, api_key=production.key("other"))
    loss = attacker.create_custom_loss(sorting, {"logprobs": 1, "weights": 1}).result()
    hostile = attacker.create_lora_training_client(BASE_MODEL, rank=4).result(timeout=120)
    neighbour = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=120)
    assert "custom loss: it took longer than the" in fails(hostile, str(loss.loss_id))
    assert sorted(trainer.poll() is None for trainer in trainers) == [False, True]
    assert (train(neighbour, 2), fingerprint(neighbour).tolist()) == (expected[0], expected[1].tolist())
