"""The parts of the client that are pure: the retry policy, cutting and joining, checkpoint paths."""

from __future__ import annotations

import pytest
import weft
from hypothesis import given, strategies as st
from weft import Datum, ModelInput, RetryPolicy
from weft.errors import status_error
from weft.runs.chunks import join, split
from weft.transport.retry import Attempts
from weft.types import ForwardBackwardOutput, ParsedCheckpointTinkerPath, TensorData

POLICY = RetryPolicy(jitter=lambda: 0.0)


def test_pauses_double_up_to_ten_seconds_for_five_minutes() -> None:
    attempts, now_s, pauses = Attempts(POLICY, 0.0), 0.0, []
    while (pause_s := attempts.pause_after(503, now_s)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert 290 < sum(pauses) <= 300


def test_jitter_shortens_by_at_most_a_quarter() -> None:
    assert RetryPolicy(jitter=lambda: 1.0).pause_s(1) == 0.75
    assert POLICY.pause_s(10_000) == 10.0


@pytest.mark.parametrize(("wish_s", "pause_s"), [(2.5, 2.5), (60.0, 60.0), (61.0, 0.5), (0.0, 0.5), (-1.0, 0.5)])
def test_the_servers_wish_counts_up_to_a_minute(wish_s: float, pause_s: float) -> None:
    assert Attempts(POLICY, 0.0).pause_after(429, 0.0, wish_s) == pause_s


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422])
def test_refusals_are_final(status: int) -> None:
    assert Attempts(POLICY, 0.0).pause_after(status, 0.0) is None


def test_only_429_is_waited_out_without_end() -> None:
    patient, now_s = Attempts(POLICY, 0.0, patient=True), 0.0
    for _ in range(200):
        now_s += 5.0
        assert patient.pause_after(429, now_s) is not None
    began_s = now_s = now_s + 10.0
    while (pause_s := patient.pause_after(503, now_s)) is not None:
        now_s += pause_s
    assert 290 <= now_s - began_s <= 300  # a later outage has its whole budget


def test_a_process_that_stood_still_asks_again() -> None:
    """A laptop that slept, or a program stopped by Ctrl-Z, has tried nothing meanwhile."""
    attempts = Attempts(POLICY, 0.0)
    assert attempts.pause_after(None, 1000.0) == 0.5
    assert attempts.pause_after(None, 2000.0) == 1.0
    now_s, pauses = 2000.0, 0.0
    while (pause_s := attempts.pause_after(503, now_s)) is not None:
        now_s += pause_s
        pauses += pause_s
    assert 100 < pauses <= 180


def test_billing_has_its_own_budget_and_restarts_the_other() -> None:
    attempts = Attempts(POLICY, 0.0)
    assert attempts.pause_after(402, 200.0) == 5.0
    assert attempts.pause_after(402, 3700.0) == 5.0
    assert attempts.pause_after(402, 3800.1) is None
    assert attempts.pause_after(503, 3900.0) == 0.5
    assert attempts.pause_after(503, 4000.0) == 1.0


def datum(length: int) -> Datum:
    return Datum(ModelInput.from_ints(list(range(length))))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5), st.integers(1, 200))
def test_parts_hold_all_data_in_order_within_the_limits(lengths: list[int], max_data: int, max_bytes: int) -> None:
    data = [datum(length) for length in lengths]
    parts = split(data, max_data, max_bytes)
    assert [one for part in parts for one in part] == data
    for part in parts:
        assert 0 < len(part) <= max_data
        assert len(part) == 1 or sum(4 * one.model_input.length for one in part) <= max_bytes


def part(count: int, **metrics: float) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData([float(count)], "float32")}] * count
    return ForwardBackwardOutput("ArrayRecord", outputs, {k.replace("__", ":"): v for k, v in metrics.items()})


def test_metrics_join_by_their_reduction() -> None:
    first = part(1, a__sum=1, a__min=1, a__max=1, a__mean=1, a__slack=1, a__hash2=1, a__unique=1, a__new=1, gone__sum=1)
    second = part(3, a__sum=5, a__min=5, a__max=5, a__mean=5, a__slack=5, a__hash2=2**64 - 1, a__unique=5, a__new=1)
    joined = join([first, second])
    assert joined.metrics == {
        "a:sum": 6,
        "a:min": 1,
        "a:max": 5,
        "a:mean": 4.0,
        "a:slack": 1.0,
        "a:hash2": 0.0,
        "a:unique": 1,
        "a:unique_1": 5,
    }
    assert [output["logprobs"].data for output in joined.loss_fn_outputs] == [[1.0], [3.0], [3.0], [3.0]]


def test_means_over_tokens_join_by_tokens_and_a_custom_losss_by_data() -> None:
    """The server's means are over positions in the loss, most of which may be in a part with few long data."""
    short = part(100, tokens__sum=100, ratio__mean=2.0)
    long = part(1, tokens__sum=900, ratio__mean=1.0)
    short.metrics["custom/own:mean"], long.metrics["custom/own:mean"] = 1.0, 102.0
    joined = join([short, long]).metrics
    assert joined == {"tokens:sum": 1000, "ratio:mean": pytest.approx(1.1), "custom/own:mean": pytest.approx(2.0)}
    none = join([part(1, tokens__sum=0, ratio__mean=2.0), part(3, tokens__sum=0, ratio__mean=4.0)])
    assert none.metrics["ratio:mean"] == 3.5


@pytest.mark.parametrize("name", ["loss", "a:b:sum", ":sum"])
def test_a_metric_without_a_reduction_is_an_error(name: str) -> None:
    with pytest.raises(weft.APIResponseValidationError, match="name:reduction"):
        join([ForwardBackwardOutput("x", [], {name: 1.0})])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "a"}, "a"),
        ({"error": "b", "category": "user"}, "b"),
        ({"error": {"message": "c"}}, "c"),
        ({"detail": [{"loc": ["body", "rank"], "msg": "too big"}]}, "body.rank: too big"),
        ("plain", "plain"),
        ({}, "the server answered with status 404"),
        (None, "the server answered with status 404"),
    ],
)
def test_the_servers_words_in_any_shape(body: object, message: str) -> None:
    error = status_error(404, body, None)
    assert (type(error), error.message) == (weft.NotFoundError, message)


def test_checkpoint_paths() -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:train:0/sampler_weights/a")
    assert (parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id) == (
        "s:train:0",
        "sampler",
        "sampler_weights/a",
    )


def test_an_error_names_the_operation_that_is_meant_else_the_request() -> None:
    body = {"detail": "no", "code": "gone", "request_id": "of-the-operation"}
    assert status_error(410, body, "of-the-request").request_id == "of-the-operation"
    assert status_error(502, "<html>", "of-the-request").request_id == "of-the-request"
