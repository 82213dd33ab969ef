"""A mistake in a request gets a clear, permanent error at once and harms nobody else, and the server goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tinker
import weft
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import ADAM, prompt, supervised

pytestmark = pytest.mark.server
Official = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quickly_and_still_up(weftd: Weftd) -> Any:
    """No mistake here may be retried for minutes, and none may harm the server."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 20
    assert httpx.get(f"{weftd.url}/api/v1/healthz").json() == {"status": "ok"}


def datum(tokens: list[int], **inputs: list[Any]) -> types.Datum:
    named = {"target_tokens": tokens, "weights": [1.0] * len(tokens)} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=named)


@pytest.fixture
def run(official: Official) -> Any:
    return official("careless").create_lora_training_client(BASE_MODEL, rank=4).result()


BAD_DATA = {
    "token out of vocabulary": ([datum([50, 10_000_000])], "cross_entropy", "10000000"),
    "second datum named": ([datum([50, 51]), datum([50, 9_999_999])], "cross_entropy", "datum 1"),
    "negative token": ([datum([50, -1])], "cross_entropy", "-1"),
    "shapes that differ": ([datum([50, 51, 52], weights=[1.0])], "cross_entropy", "weights"),
    "NaN": ([datum([50, 51], weights=[1.0, math.nan])], "cross_entropy", "finite"),
    "infinite advantage": (
        [datum([50, 51], logprobs=[0.0, 0.0], advantages=[1.0, math.inf])],
        "importance_sampling",
        "advantages",
    ),
    "missing input": ([datum([50, 51])], "ppo", "logprobs"),
    "unknown loss": ([datum([50, 51])], "hinge", "hinge"),
    "context too long": ([datum([50] * 50_000)], "cross_entropy", "50000"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(run: Any, case: str) -> None:
    data, loss, named = BAD_DATA[case]
    with pytest.raises(tinker.TinkerError, match=named):
        run.forward_backward(data, loss).result()


def test_an_unknown_base_model_is_named_with_those_that_are_served(official: Official) -> None:
    with pytest.raises(tinker.TinkerError, match=r"nobody/nothing.*weft/tiny-moe"):
        official().create_lora_training_client("nobody/nothing").result()


def test_a_rank_beyond_the_limit(official: Official) -> None:
    with pytest.raises(tinker.TinkerError, match="100000"):
        official().create_lora_training_client(BASE_MODEL, rank=100_000).result()


def test_a_wrong_key(weftd: Weftd) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=weftd.url, api_key="tml-wrong").create_lora_training_client(BASE_MODEL).result()


def test_a_prompt_that_does_not_fit(official: Official) -> None:
    sampler = official().create_sampling_client(base_model=BASE_MODEL).result()
    with pytest.raises(tinker.TinkerError, match="50000"):
        sampler.sample(types.ModelInput.from_ints([50] * 50_000), 1, types.SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize(
    ("params", "named"),
    [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"max_tokens": -1}, "max_tokens")],
)
def test_bad_sampling_parameters(official: Official, params: dict[str, Any], named: str) -> None:
    sampler = official().create_sampling_client(base_model=BASE_MODEL).result()
    with pytest.raises(tinker.TinkerError, match=named):
        sampler.sample(prompt(), 1, types.SamplingParams(**{"max_tokens": 1} | params)).result()


def test_unknown_and_foreign_runs_are_the_same_404(weftd: Weftd, official: Official) -> None:
    mine = official("owner").create_lora_training_client(BASE_MODEL, rank=2).result()
    headers = {"X-API-Key": weftd.key("stranger")}
    body = {"seq_id": 1, "adam_params": {"learning_rate": 1e-3}, "type": "optim_step"}
    with httpx.Client(base_url=weftd.url, headers=headers) as http:
        foreign = http.post("/api/v1/optim_step", json=body | {"model_id": mine.model_id})
        unknown = http.post("/api/v1/optim_step", json=body | {"model_id": "00000000-0000:train:0"})
        info = http.post("/api/v1/get_info", json={"model_id": mine.model_id, "type": "get_info"})
        listed = http.get("/api/v1/training_runs").json()["training_runs"]
    assert [foreign.status_code, unknown.status_code, info.status_code] == [404, 404, 404]
    assert listed == []
    assert foreign.json()["detail"].replace(mine.model_id, "") == unknown.json()["detail"].replace(
        "00000000-0000:train:0", ""
    )


def test_a_foreign_checkpoint_cannot_be_loaded_or_sampled(official: Official) -> None:
    mine = official("owner").create_lora_training_client(BASE_MODEL, rank=2).result()
    state = mine.save_state("secret").result().path
    named = mine.save_weights_for_sampler("secret").result().path
    stranger = official("stranger")
    with pytest.raises(tinker.NotFoundError):
        stranger.create_training_client_from_state(state).result()
    with pytest.raises(tinker.NotFoundError):
        stranger.create_sampling_client(model_path=named).result()


def test_a_refused_operation_does_not_wedge_the_run(official: Official) -> None:
    """The SDK has given the refused operation a number; later operations must not wait for it for ever."""
    run = official("careless").create_lora_training_client(BASE_MODEL, rank=4).result()
    with pytest.raises(tinker.TinkerError):
        run.forward_backward([datum([50, 10_000_000])], "cross_entropy").result()
    fine = run.forward_backward(supervised(), "cross_entropy").result(timeout=60)
    assert math.isfinite(fine.metrics["loss:sum"])
    run.optim_step(ADAM).result(timeout=60)


def test_a_name_used_twice_fails_at_once(run: Any) -> None:
    run.save_state("twice").result()
    with pytest.raises(tinker.TinkerError, match="twice"):
        run.save_state("twice").result()


HALF = "\ud83d"  # half of a character: JSON within JSON can spell it, UTF-8 cannot
PLAIN = weft.Datum(weft.ModelInput.from_ints([50, 51]), {"target_tokens": [51, 52], "weights": [1.0, 1.0]})
NOT_WRITTEN: dict[str, Callable[[weft.TrainingClient], Any]] = {
    "loss": lambda run: run.forward_backward([PLAIN], HALF),
    "name of a setting": lambda run: run.forward_backward([PLAIN], "cross_entropy", {HALF: 1.0}),
    "setting": lambda run: run.forward_backward([PLAIN], "cross_entropy", {"x": object()}),  # type: ignore[dict-item]
    "metadata": lambda run: run.save_state("kept", user_metadata={"of": HALF}),
    "rate": lambda run: run.optim_step(weft.AdamParams().model_copy(update={"learning_rate": math.nan})),
}


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_what_cannot_be_written_is_not_sent_and_the_run_goes_on(weftd: Weftd, case: str) -> None:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("careless")) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4)
        with pytest.raises((ValueError, TypeError)):
            NOT_WRITTEN[case](run).result(10)
        if case in ("loss", "name of a setting", "setting"):
            with pytest.raises(weft.WeftError, match="its gradient is missing"):
                run.optim_step(weft.AdamParams()).result(10)
        run.forward_backward([PLAIN], "cross_entropy").result(10)
        update = run.optim_step(weft.AdamParams()).result(10)
        assert update.metrics is not None
        assert update.metrics["step:max"] == 1


def test_what_is_too_large_to_be_read_uses_no_number(weftd: Weftd) -> None:
    """The server has not read the request's number, and would wait for it."""
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("careless")) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4)
        for _ in range(2):
            with pytest.raises(weft.APIStatusError, match="the body is larger than the limit of 65536 bytes"):
                run.save_state("kept", user_metadata={"of": "x" * 100_000}).result(10)
        with pytest.raises(weft.BadRequestError, match="the limit is 16384"):
            run.save_state("kept", user_metadata={"of": "x" * 20_000}).result(10)
        update = run.optim_step(weft.AdamParams()).result(10)
        assert update.metrics is not None
        assert update.metrics["step:max"] == 1
