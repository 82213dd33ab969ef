"""Operations arrive twice, out of order or cut off: a run ends as if each had come once, in order.

The results are compared bitwise with those of the same operations sent one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from weft.wire.binary.train_codec import ArrayDatum, decode_train_output

from tests.e2e.conftest import Weftd
from tests.e2e.raw import Post, RawClient, optim_post, train_post
from tests.search import examples

pytestmark = pytest.mark.server

Step = Literal["forward_backward", "optim_step", "forward"]
#: What happens to one request: it is answered; its answer is lost; it breaks off half-way, or before the body.
Fate = Literal["answered", "answer lost", "half sent", "head sent"]
SHARES: dict[str, float] = {"answer lost": 1.0, "half sent": 0.5, "head sent": 0.0}

scripts = st.lists(st.sampled_from(["forward_backward", "optim_step", "forward"]), min_size=2, max_size=7)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[tuple[Step, ...], list[tuple[int, Fate]]]:
    """The operations of a run, and every attempt to send a part of it, in the order of sending."""
    script = (*draw(scripts), "forward_backward", "optim_step", "forward")
    fates = st.sampled_from(["answered", "answer lost", "half sent", "head sent"])
    attempts = draw(st.lists(st.tuples(st.integers(0, len(script) - 1), fates), max_size=2 * len(script)))
    certain = [(index, "answered") for index in range(len(script))]
    return script, draw(st.permutations(attempts + certain))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def client(weftd: Weftd) -> RawClient:
    return RawClient(weftd, "delivery")


@pytest.fixture(scope="module")
def in_order(client: RawClient) -> Callable[[tuple[Step, ...]], list[Any]]:
    """The results of a script's operations when each is sent once, in order."""

    @cache
    def results(script: tuple[Step, ...]) -> list[Any]:
        run_id = client.new_run()
        return [
            _result(client, step, client.post(post)) for step, post in zip(script, posts(run_id, script), strict=True)
        ]

    return results


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deliveries())
def test_a_run_ends_as_if_each_operation_came_once_in_order(
    client: RawClient,
    in_order: Callable[[tuple[Step, ...]], list[Any]],
    delivery: tuple[tuple[Step, ...], list[tuple[int, Fate]]],
) -> None:
    script, attempts = delivery
    run_id = client.new_run()
    sent = posts(run_id, script)

    def send(attempt: tuple[int, Fate]) -> tuple[int, str] | None:
        index, fate = attempt
        if fate != "answered":
            client.broken_post(sent[index], SHARES[fate])
            return None
        reply = client.post(sent[index])
        assert reply.status_code == 200, reply.text
        return index, reply.json()["request_id"]

    with ThreadPoolExecutor(3) as pool:
        answers = [answer for answer in pool.map(send, attempts) if answer is not None]
    ids = dict(answers)
    assert all(ids[index] == request_id for index, request_id in answers), "one operation got two ids"
    found = [_result(client, step, client.post(post)) for step, post in zip(script, sent, strict=True)]
    _check_equal(found, in_order(script))


def test_another_operation_under_a_used_number_is_refused_and_changes_nothing(client: RawClient) -> None:
    script: tuple[Step, ...] = ("forward_backward", "optim_step", "forward")
    run_id = client.new_run()
    sent = posts(run_id, script)
    found = [_result(client, step, client.post(post)) for step, post in zip(script, sent, strict=True)]
    for forged in (optim_post(run_id, 2, 0.5), optim_post(run_id, 1, 0.01), train_post(run_id, 2, DATA)):
        reply = client.post(forged)
        assert reply.status_code == 400, reply.text
    again = client.post(train_post(run_id, 4, DATA, forward_only=True))
    np.testing.assert_array_equal(_result(client, "forward", again)[0], found[2][0])


def posts(run_id: str, script: tuple[Step, ...]) -> list[Post]:
    """The requests of a script; each step has data and a rate of its own."""

    def post(seq: int, step: Step) -> Post:
        if step == "optim_step":
            return optim_post(run_id, seq, 1e-3 * seq)
        data = DATA if step == "forward" else [_datum(seq, length) for length in (6, 9)]
        return train_post(run_id, seq, data, forward_only=step == "forward")

    return [post(seq, step) for seq, step in enumerate(script, start=1)]


def _datum(seed: int, length: int) -> ArrayDatum:
    ids = np.array([(31 * seed + 7 * j) % 300 + 30 for j in range(length + 1)])
    inputs = {"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(length, dtype=np.float32)}
    return ArrayDatum(tokens=ids[:-1].astype(np.int32), inputs=inputs)


DATA = [_datum(3, 12)]


def _result(client: RawClient, step: Step, reply: Any) -> Any:
    """The metrics of an optimizer step; of another operation all logprobs and metrics."""
    assert reply.status_code == 200, reply.text
    payload = client.result(reply.json()["request_id"])
    if step == "optim_step":
        return json.loads(payload)
    outputs, metrics = decode_train_output(payload)
    return np.concatenate([row["logprobs"] for row in outputs]), metrics


def _check_equal(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, dict):
            assert ours == theirs
        else:
            np.testing.assert_array_equal(ours[0], theirs[0])
            assert ours[1] == theirs[1]
