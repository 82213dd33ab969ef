"""What stop means on the wire, and that a body survives the way to the engine and back."""

from __future__ import annotations

import numpy as np
import pytest
from weft.wire import ModelInput, SampleRequest, SequenceResult, decode_sample_response
from weft.wire import SamplingParams as WireSamplingParams

from scheduler.messages import SampleOp
from store.blobs import Blobs
from workers.generator.engine import Facts, Finished, RequestError
from workers.generator.requests import answer, read_request, read_sampling


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


def test_body_becomes_a_request(blobs: Blobs) -> None:
    params = WireSamplingParams(max_tokens=4, temperature=0.5, top_k=3, top_p=0.9, seed=8)
    body = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]), sampling_params=params, num_samples=2, topk_prompt_logprobs=5
    )
    blobs.put("ops/1/body", body.model_dump_json(exclude_none=True).encode())
    request = read_request(SampleOp("op", "base", "ops/1/body", 2, "samplers/s"), blobs)
    assert (request.id, request.prompt, request.num_samples) == ("op", (1, 2, 3), 2)
    assert (request.adapter, request.adapter_folder) == ("samplers/s", blobs.path("samplers/s"))
    assert (request.prompt_logprobs, request.topk_prompt_logprobs) == (False, 5)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.top_k) == (4, 8, 3)


def test_answers() -> None:
    sequence = SequenceResult(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), "stop")
    logprobs = np.array([np.nan, -3], np.float32)
    done = answer(Finished("op", (sequence,), logprobs, facts=Facts(2, 0, 2)))
    assert done.facts == {"prefill": 2, "cached_prefill": 0, "sample": 2}
    result = decode_sample_response(done.payload)
    assert result.sequences[0].tokens.tolist() == [4, 5]
    assert result.sequences[0].stop_reason == "stop"
    assert np.array_equal(result.prompt_logprobs, logprobs, equal_nan=True)  # type: ignore[arg-type]
    failed = answer(Finished("op", error=RequestError("too long", "user")))
    assert failed.failure is not None
    assert (failed.failure.message, failed.failure.category) == ("too long", "user")
