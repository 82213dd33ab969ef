"""`weft health RUN` and `RestClient.get_run_health`."""

from __future__ import annotations

from click.testing import CliRunner
from weft import ServiceClient
from weft.cli import main

from tests.client_sdk.stub_server import Stub

RUN = "5e55:train:0"
HEALTH = {
    "run_id": RUN,
    "window_s": 600.0,
    "trainer_wait": 0.744,
    "generator_occupancy": 0.95,
    "sequences_in_flight": 12.5,
    "sampled_tokens": 1000,
    "trained_tokens": 400,
    "sampled_tokens_per_s": 1.7,
    "trained_tokens_per_s": 0.7,
    "acceptance": 0.4,
    "staleness": {"0": 16, "2": 4},
    "queue_p50_s": 0.5,
    "queue_p95_s": 9.25,
    "stall": {
        "waiting_for": "sampling",
        "open_groups": 3,
        "groups": 32,
        "open_training": 0,
        "oldest_request_id": "r1",
        "oldest_s": 412.0,
        "reason": "it is next",
        "sentence": "waiting for 3 of 32 groups; oldest sample 412 s, it is next",
    },
}


def test_health_is_read(stub: Stub) -> None:
    stub.replies[f"GET /weft/runs/{RUN}/health"] = HEALTH
    found = ServiceClient(base_url=stub.base_url, api_key="tml-test").create_rest_client().get_run_health(RUN).result()
    assert found.staleness == {0: 16, 2: 4}
    assert (found.stall.waiting_for, found.stall.oldest_s) == ("sampling", 412.0)


def test_health_is_shown(stub: Stub) -> None:
    stub.replies[f"GET /weft/runs/{RUN}/health"] = HEALTH
    env = {"WEFT_BASE_URL": stub.base_url, "WEFT_API_KEY": "tml-test", "COLUMNS": "200"}
    shown = CliRunner().invoke(main, ["health", RUN], env=env)
    assert shown.exit_code == 0, shown.output
    for cell in (
        "74.4%",
        "95.0%",
        "0: 16, 2: 4",
        "0.40",
        "waiting for 3 of 32 groups; oldest sample 412 s, it is next",
    ):
        assert cell in shown.output
