"""Spans that name sampled sequences, and the logprobs that the server has recorded for those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from weft.wire import PromptProvenanceSpan, SampledProvenanceSpan
from weft.wire.binary.train_codec import ArrayDatum, decode_train_request, encode_train_request

from scheduler.links.messages import stability_ref
from store.blobs.contract import StoreAway
from tests.api.conftest import World
from tests.api.data import batch, datum


def prompt(length: int, offset: int = 0) -> PromptProvenanceSpan:
    return PromptProvenanceSpan(sequence_id="op:0", offset=offset, length=length)


def sampled(length: int, offset: int = 0, name: str = "op:0") -> SampledProvenanceSpan:
    return SampledProvenanceSpan(sequence_id=name, offset=offset, length=length)


def spanned(targets: list[Any], mine: list[Any] | None = None, **inputs: Any) -> ArrayDatum:
    """A datum of five tokens: two of a prompt and three of four sampled ones; its targets are shifted by one."""
    given = {"weights": None, "advantages": [0.0, 1.0, 1.0, 1.0, 1.0], **inputs}
    plain = datum([1, 2, 3, 4, 5], **given)
    return replace(plain, model_input_spans=mine or [prompt(2), sampled(3)], loss_fn_input_spans=targets)


WHOLE = [prompt(1, 1), sampled(4)]


def record(world: World, session: str, values: list[float], name: str = "op:0") -> None:
    world.service.blobs.put(stability_ref(session, name), np.array(values, "<f4").tobytes())


def test_spans_travel_in_the_protobuf() -> None:
    sent = batch("r", 1, [spanned(WHOLE), datum([1])], loss_fn="stable_reinforce")
    got = decode_train_request(encode_train_request(sent))
    assert got.data[0].loss_fn_input_spans == WHOLE
    assert got.data[0].model_input_spans == [prompt(2), sampled(3)]
    assert got.data[1].model_input_spans is got.data[1].loss_fn_input_spans is None


def test_missing_logprobs_are_those_recorded(world: World) -> None:
    session = world.session()
    run = world.run(session)
    record(world, session, [-0.1, -0.2, -0.3, -0.4])
    record(world, session, [-1.0, -2.0], "op:1")
    two = [prompt(1), sampled(2, 2), prompt(1), sampled(1, 1, "op:1")]
    given = spanned(WHOLE, logprobs=[0.0, -9.0, -9.0, -9.0, -9.0])
    data = [spanned(WHOLE), spanned(two, advantages=[0.0, 1.0, 1.0, 0.0, 1.0]), given]
    request = batch(run, 1, data, loss_fn="stable_reinforce")
    reply = world.train(request)
    kept = decode_train_request(world.service.blobs.get(world.operation(reply["request_id"]).body_ref))
    expected = [[0.0, -0.1, -0.2, -0.3, -0.4], [0.0, -0.3, -0.4, 0.0, -2.0], [0.0, -9.0, -9.0, -9.0, -9.0]]
    for got, wanted in zip(kept.data, expected, strict=True):
        np.testing.assert_allclose(got.inputs["logprobs"], wanted, rtol=1e-6)
    assert world.train(request)["request_id"] == reply["request_id"], "a repeat is known by what was sent"
    world.service.blobs.delete_tree(f"stability/{session}")
    assert world.train(request)["request_id"] == reply["request_id"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (datum([1, 2], weights=None, advantages=[1.0, 1.0]), "needs the input 'logprobs', or provenance spans"),
        (spanned([prompt(1), sampled(4, 1)]), "covers tokens 1 to 5 of sequence 'op:0', which has 4"),
        (spanned([prompt(1), sampled(4, 0, "op:7")]), "nothing is recorded of sequence 'op:7'"),
        (spanned([prompt(1), sampled(4, 0, "../op:0")]), "nothing is recorded"),
        (spanned([prompt(1), sampled(3)]), "loss_fn_input_spans cover 4 positions of 5"),
        (spanned([prompt(1), sampled(2**50)]), "loss_fn_input_spans cover"),
        (spanned(WHOLE, [prompt(4)]), "model_input_spans cover 4 positions of 5"),
        (spanned(WHOLE, advantages=[1.0] * 5), "advantage at position 0 is not 0"),
        (replace(spanned(WHOLE), model_input_spans=None), "come as a pair"),
    ],
)
def test_refusals(world: World, bad: ArrayDatum, words: str) -> None:
    session = world.session()
    run = world.run(session)
    record(world, session, [-0.1, -0.2, -0.3, -0.4])
    reply = world.train(batch(run, 1, [spanned(WHOLE), bad], loss_fn="stable_reinforce"))
    error = world.error(reply["request_id"])
    assert words in error
    assert "datum 1" in error


def test_recordings_of_another_session_are_not_there(world: World) -> None:
    record(world, world.session(), [-0.1, -0.2, -0.3, -0.4])
    reply = world.train(batch(world.run(), 1, [spanned(WHOLE)], loss_fn="stable_reinforce"))
    assert "nothing is recorded" in world.error(reply["request_id"])


def test_while_recordings_cannot_be_read_the_number_is_not_spent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_ref: str, _sha256: str = "") -> bytes:
        raise StoreAway("the server's object store does not answer (Unreachable)")

    session = world.session()
    run = world.run(session)
    record(world, session, [-0.1, -0.2, -0.3, -0.4])
    request = batch(run, 1, [spanned(WHOLE)], loss_fn="stable_reinforce")
    with monkeypatch.context() as patch:
        patch.setattr(world.service.blobs, "get", away)
        assert "object store does not answer" in world.train(request, status=503)["detail"]
    assert world.operation(world.train(request)["request_id"]).state == "queued"


def test_other_losses_may_carry_spans(world: World) -> None:
    plain = replace(datum([1, 2]), model_input_spans=[prompt(2)], loss_fn_input_spans=[prompt(1), sampled(1)])
    run = world.run()
    assert world.operation(world.train(batch(run, 1, [plain]))["request_id"]).state == "queued"
    wrong = replace(plain, loss_fn_input_spans=[prompt(1)])
    assert "cover 1 positions of 2" in world.error(world.train(batch(run, 2, [wrong]))["request_id"])


def test_sequences_of_which_no_token_is_trained_are_not_remembered(world: World) -> None:
    """Thousands of names for each token would stay in the operation's row as long as the run exists."""
    run = world.run()
    names = [sampled(0, name=f"op:{number}") for number in range(200)]
    spans = [*names, prompt(1), sampled(4)]
    given = spanned(spans, spans, weights=[1.0] * 5, advantages=None)
    request_id = world.train(batch(run, 1, [given]))["request_id"]
    assert world.operation(request_id).plan["sequences"] == {"op:0": 4}
