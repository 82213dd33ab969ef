"""Translation between wire and engine: from a sample's body to a `PendingSample`, and from a `Finished` to a `Done`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from weft.wire import SampleRequest, SamplingParams as WireSamplingParams, TensorData
from weft.wire.binary.sample_codec import SampleUsage, encode_sample_response

from scheduler.links.messages import Declined, Done, Failure, SampleOp
from store.blobs.ahead import Ahead
from store.blobs.contract import Blobs
from workers.generator.engine import Finished, GenerateRequest, Logprobs, RequestError, SamplingParams, TargetTokens


@dataclass(frozen=True)
class PendingSample:
    """A request, and what its answer needs besides the engine's result."""

    op: SampleOp
    request: GenerateRequest
    targets: TensorData | None  # as the client sent them: the answer has their shape and layout
    record_stability: bool
    stream: bool = False
    taken: datetime = field(default_factory=lambda: datetime.now(UTC))


def read_sample(op: SampleOp, blobs: Blobs, bodies: Ahead) -> PendingSample:
    """Read and translate the body of an operation. Raises when it is missing or malformed."""
    body = SampleRequest.model_validate_json(bodies.get(op.body_ref, op.body_sha256, op.body))
    request = GenerateRequest(
        id=op.op_id,
        prompt=tuple(body.prompt.to_ints()),
        sampling=read_sampling(body.sampling_params),
        num_samples=body.num_samples,
        tenant=op.org_id,
        adapter=policy_name(op),
        adapter_folder=blobs.at(op.adapter_ref) if op.adapter_ref else None,
        prompt_logprobs=bool(body.prompt_logprobs),
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_tokens=None if body.target_prompt_logprobs is None else read_targets(body.target_prompt_logprobs),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        priority=op.priority,
        run=op.run_id,
        max_staleness=body.max_staleness,
        return_routed_experts=bool(body.return_routed_experts),
    )
    return PendingSample(op, request, body.target_prompt_logprobs, bool(body.record_stability_info), bool(body.stream))


def policy_name(op: SampleOp) -> str:
    """The name of the weights in an engine: the run's, for weights that follow it, else their ref."""
    return inflight_name(op.run_id) if op.inflight and op.adapter_ref else op.adapter_ref


def inflight_name(run_id: str) -> str:
    return f"inflight:{run_id}"


def read_targets(wire: TensorData) -> TargetTokens:
    """The cells that a [rows, K] tensor lists, row by row; a dense one lists all."""
    rows, columns = wire.shape or (0, 0)
    if wire.sparse_crow_indices is not None:
        starts = np.asarray(wire.sparse_crow_indices, dtype=np.int64)
        counts = starts[1:] - starts[:-1]
    else:
        counts = np.full(rows, columns, dtype=np.int64)
    return TargetTokens(np.repeat(np.arange(rows), counts), wire.values.astype(np.int64))


def _like(wire: TensorData, values: Logprobs) -> TensorData:
    return TensorData(values, "float32", wire.shape, wire.sparse_crow_indices, wire.sparse_col_indices)


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


def answer(pending: PendingSample, finished: Finished) -> Done | Declined:
    """The message to the queue about a request that ended."""
    facts, targets = finished.facts, None
    counts = {"prefill": facts.prefill, "cached_prefill": facts.cached_prefill, "sample": facts.sample}
    if finished.error is not None and finished.error.ran:
        return Done(finished.id, facts=counts, failure=Failure(finished.error.message, "user", ran=True))
    if finished.error is not None:
        return _refusal(finished.id, finished.error)
    if pending.targets is not None and finished.target_logprobs is not None:
        targets = _like(pending.targets, finished.target_logprobs)
    payload = encode_sample_response(
        finished.sequences,
        finished.prompt_logprobs,
        facts.cache_hit,
        finished.topk_prompt_logprobs,
        targets,
        finished.prompt_alt_tokens,
        SampleUsage(facts.prefill, facts.cached_prefill, facts.sample),
    )
    drawn = _drawn(finished) if pending.op.run_id else ()
    return Done(finished.id, payload=payload, facts=counts, drawn=drawn, recorded=pending.record_stability)


def _drawn(finished: Finished) -> tuple[dict[int, int], ...]:
    """The tokens of each sequence by policy version."""
    drawn: list[dict[int, int]] = []
    for sequence in finished.sequences:
        counts = Counter[int]()
        for span in sequence.policy:
            counts[span.version] += span.length
        drawn.append(dict(counts))
    return tuple(drawn)


def _refusal(op_id: str, error: RequestError) -> Done | Declined:
    if error.elsewhere:
        return Declined(op_id, error.message, adapter=error.elsewhere == "weights", lost=error.elsewhere == "again")
    return failure(op_id, error.message, error.category)


def failure(op_id: str, message: str, category: str = "server") -> Done:
    return Done(op_id, failure=Failure(message, category))
