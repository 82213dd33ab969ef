from __future__ import annotations

import json
import logging
import time

import pytest
import weft

from tests.client_sdk.stub_server import Stub
from tests.waiting import until


def logged(stub: Stub) -> list[tuple[str, int, float]]:
    sent = [json.loads(asked.body) for asked in stub.asked if asked.path.endswith("/metrics")]
    return [(point["name"], point["step"], point["value"]) for body in sent for point in body["points"]]


def test_points_gather_and_are_sent_at_the_end(stub: Stub, service: weft.ServiceClient) -> None:
    with service:
        training = service.create_lora_training_client("org/tiny")
        for step in range(50):
            weft.log(training, {"reward": step / 10, "loss": -1}, step=step)
        training.log({"reward": 9.0})
    assert len(logged(stub)) == 101
    assert logged(stub)[-1] == ("reward", 50, 9.0)
    requests = [asked for asked in stub.asked if asked.path.endswith("/metrics")]
    assert len(requests) <= 3
    assert requests[0].path.startswith("/weft/runs/")


def test_a_second_close_waits_for_the_first(stub: Stub, service: weft.ServiceClient) -> None:
    weft.log(service.create_lora_training_client("org/tiny"), {"reward": 1.0})
    service.close()
    service.close().result()
    assert logged(stub) == [("reward", 0, 1.0)]
    assert sum(path.endswith("/finish") for path in stub.paths()) == 1


def test_logging_costs_nothing_and_goes_on_by_itself(stub: Stub, service: weft.ServiceClient) -> None:
    with service:
        training = service.create_lora_training_client("org/tiny").result()
        started = time.process_time()
        for step in range(2_000):
            training.log({"reward": 1.0}, step)
        assert (time.process_time() - started) / 2_000 < 1e-3
        until(lambda: len(logged(stub)) >= 2_000)
        assert len(logged(stub)) == 2_000


def test_what_is_refused_does_not_harm_the_run(
    stub: Stub, service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    from starlette.responses import JSONResponse

    with service:
        training = service.create_lora_training_client("org/tiny").result()
        path = f"/weft/runs/{training.model_id}/metrics"
        stub.faults[path].append(JSONResponse({"detail": "no"}, 400))
        with caplog.at_level(logging.WARNING, "weft"):
            training.log({"reward": 1.0, "loss": float("nan")})
        assert "loss is nan" in caplog.text
    assert "1 logged points were dropped" in caplog.text


def test_what_no_curve_can_be_is_told_once_and_harms_nothing(
    stub: Stub, service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["", "größe", "a" * 65, "new\nline", "\ud800"]
    with service, caplog.at_level(logging.WARNING, "weft"):
        training = service.create_lora_training_client("org/tiny")
        for step in range(3):
            training.log({**dict.fromkeys(names, 1.0), "reward": step}, step)
        training.log({"reward": 9.0}, -1)
    assert logged(stub) == [("reward", 0, 0.0), ("reward", 1, 1.0), ("reward", 2, 2.0)]
    for name in [*names, "reward"]:
        assert caplog.text.count(f"{name!r} is not logged at step") == 1
