"""Between the wire and the engine: a sample body becomes a GenerateRequest, a Finished becomes a Done."""

from __future__ import annotations

from weft.wire import SampleRequest
from weft.wire import SamplingParams as WireSamplingParams
from weft.wire.sample_codec import encode_sample_response

from scheduler.messages import Done, Failure, SampleOp
from store.blobs import Blobs
from workers.generator.engine import Finished, GenerateRequest, SamplingParams


def read_request(op: SampleOp, blobs: Blobs) -> GenerateRequest:
    """Read and translate the body of an operation. Raises when it is missing or malformed."""
    body = SampleRequest.model_validate_json(blobs.get(op.body_ref))
    return GenerateRequest(
        id=op.op_id,
        prompt=tuple(body.prompt.to_ints()),
        sampling=read_sampling(body.sampling_params),
        num_samples=body.num_samples,
        adapter=op.adapter_ref,
        adapter_folder=blobs.path(op.adapter_ref) if op.adapter_ref else None,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


def read_sampling(wire: WireSamplingParams) -> SamplingParams:
    """A list of token ids says exactly which tokens stop, so it replaces EOS, and the empty list means that nothing
    stops; stop strings are about text and leave EOS in force."""
    stops = [wire.stop] if isinstance(wire.stop, str) else wire.stop
    strings = tuple(stop for stop in stops or () if isinstance(stop, str))
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        seed=wire.seed,
        stop_at_eos=stops is None or bool(strings),
        stop_token_ids=tuple(stop for stop in stops or () if isinstance(stop, int)),
        stop_strings=strings,
    )


def answer(finished: Finished) -> Done:
    """What the queue is told of a request that ended."""
    if finished.error is not None:
        return failure(finished.id, finished.error.message, finished.error.category)
    payload = encode_sample_response(
        finished.sequences, finished.prompt_logprobs, topk_prompt_logprobs=finished.topk_prompt_logprobs
    )
    facts = finished.facts
    counts = {"prefill": facts.prefill, "cached_prefill": facts.cached_prefill, "sample": facts.sample}
    return Done(finished.id, payload=payload, facts=counts)


def failure(op_id: str, message: str, category: str = "server") -> Done:
    return Done(op_id, failure=Failure(message, category))
