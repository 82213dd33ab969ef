"""The forms of `stop` on the wire, and that a body survives the way to the engine and back."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from weft.wire import ModelInput, SampleRequest, SamplingParams as WireSamplingParams, TensorData
from weft.wire.binary.sample_codec import PolicySpan, SequenceResult, decode_sample_response

from scheduler.links.messages import Done, Failure, SampleOp
from store.blobs.ahead import Ahead
from store.blobs.folder import FolderBlobs
from workers.generator.engine import Facts, Finished, RequestError
from workers.generator.requests.bodies import PendingSample, answer, read_sample, read_sampling


@pytest.mark.parametrize(
    ("stop", "eos", "tokens", "strings"),
    [
        pytest.param(None, True, (), (), id="absent"),
        pytest.param([], False, (), (), id="nothing-stops"),
        pytest.param([5, 6], False, (5, 6), (), id="token-ids"),
        pytest.param("end", True, (), ("end",), id="string"),
        pytest.param(["a", "b"], True, (), ("a", "b"), id="strings"),
    ],
)
def test_stop(stop: object, eos: bool, tokens: tuple[int, ...], strings: tuple[str, ...]) -> None:
    sampling = read_sampling(WireSamplingParams.model_validate({"stop": stop}))
    assert (sampling.stop_at_eos, sampling.stop_token_ids, sampling.stop_strings) == (eos, tokens, strings)


def test_body_becomes_a_request(blobs: FolderBlobs) -> None:
    params = WireSamplingParams(max_tokens=4, temperature=0.5, top_k=3, top_p=0.9, seed=8)
    body = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]), sampling_params=params, num_samples=2, topk_prompt_logprobs=5
    )
    blobs.put("ops/1/body", body.model_dump_json(exclude_none=True).encode())
    pending = read_sample(SampleOp("op", "base", "ops/1/body", 2, "samplers/s"), blobs, Ahead(blobs))
    request = pending.request
    assert (pending.record_stability, pending.targets, request.target_tokens) == (False, None, None)
    assert (request.id, request.prompt, request.num_samples) == ("op", (1, 2, 3), 2)
    assert (request.adapter, request.adapter_folder) == ("samplers/s", blobs.path("samplers/s"))
    assert (request.prompt_logprobs, request.topk_prompt_logprobs) == (False, 5)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.top_k) == (4, 8, 3)


def pending_of(blobs: FolderBlobs, **fields: object) -> PendingSample:
    body = SampleRequest.model_validate(
        {"prompt": ModelInput.from_ints([1, 2, 3]), "sampling_params": WireSamplingParams(), **fields}
    )
    blobs.put("ops/1/body", body.model_dump_json(exclude_none=True).encode())
    return read_sample(SampleOp("op", "base", "ops/1/body", body.num_samples, session_id="s"), blobs, Ahead(blobs))


SEQUENCE = SequenceResult(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), "stop")


def test_answers(blobs: FolderBlobs) -> None:
    pending = pending_of(blobs)
    logprobs = np.array([np.nan, -3], np.float32)
    alternatives = (np.array([[6, 7]]), np.array([[-1, -2]], np.float32))
    facts = Facts(2, 40, 2, cache_hit=38)
    done = answer(pending, Finished("op", (SEQUENCE,), logprobs, prompt_alt_tokens=alternatives, facts=facts))
    assert done.facts == {"prefill": 2, "cached_prefill": 40, "sample": 2}
    result = decode_sample_response(done.payload)
    assert result.prompt_cache_hit_tokens == 38
    assert result.sequences[0].tokens.tolist() == [4, 5]
    assert result.sequences[0].stop_reason == "stop"
    assert np.array_equal(result.prompt_logprobs, logprobs, equal_nan=True)  # type: ignore[arg-type]
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens[0].tolist() == [[6, 7]]
    error = RequestError("the logits are not finite", "user", ran=True)
    ran = answer(pending, Finished("op", error=error, facts=facts))
    assert (ran.failure, ran.facts) == (Failure(error.message, "user", ran=True), done.facts)  # type: ignore[union-attr]
    failed = answer(pending, Finished("op", error=RequestError("too long", "user")))
    assert failed.failure is not None
    assert (failed.failure.message, failed.failure.category) == ("too long", "user")


def test_an_answer_counts_tokens_of_each_sequence_by_version_where_the_weights_are_of_a_run(blobs: FolderBlobs) -> None:
    pending = pending_of(blobs)
    moved = replace(SEQUENCE, policy=(PolicySpan(6, 1), PolicySpan(7, 1)))
    finished = Finished("op", (SEQUENCE, moved, moved))
    assert answer(pending, finished).drawn == ()  # type: ignore[union-attr]
    of_a_run = replace(pending, op=msgspec.structs.replace(pending.op, run_id="run"))
    assert answer(of_a_run, finished).drawn == ({}, {6: 1, 7: 1}, {6: 1, 7: 1})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wire", "rows", "ids"),
    [
        pytest.param(TensorData([5, -1, 6, 7], "int64", [2, 2]), [0, 0, 1, 1], [5, -1, 6, 7], id="dense"),
        pytest.param(TensorData([9, 8, 9], "int64", [2, 50], [0, 1, 3], [49, 0, 2]), [0, 1, 1], [9, 8, 9], id="csr"),
    ],
)
def test_targets_are_answered_in_their_layout(
    blobs: FolderBlobs, wire: TensorData, rows: list[int], ids: list[int]
) -> None:
    pending = pending_of(blobs, target_prompt_logprobs=wire)
    targets = pending.request.target_tokens
    assert targets is not None
    assert (targets.rows.tolist(), targets.ids.tolist()) == (rows, ids)
    told = np.arange(len(ids), dtype=np.float32)
    result = decode_sample_response(answer(pending, Finished("op", (SEQUENCE,), target_logprobs=told)).payload)
    assert result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.to_json() == wire.to_json() | {"data": told.tolist(), "dtype": "float32"}


def test_an_answer_says_that_its_logprobs_are_to_be_kept(blobs: FolderBlobs) -> None:
    for asked in (True, False):
        told = answer(pending_of(blobs, record_stability_info=asked), Finished("op", (SEQUENCE,)))
        assert isinstance(told, Done)
        assert told.recorded is asked
