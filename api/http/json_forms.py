"""JSON forms of what is protobuf today, for clients from before that (tinker up to 0.22) and for anybody without it.

A body is rewritten into its protobuf form before anything judges it, so both forms meet the same checks and workers
know only one. Results are rewritten for clients that accept nothing but JSON.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from weft.wire import EncodedTextChunk, ModelInput
from weft.wire.base import Integer, Request
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import INT32, INT64
from weft.wire.binary.sample_codec import decode_sample_response
from weft.wire.binary.train_codec import decode_train_output, write_config
from weft.wire.tensor import TensorData, values_of

from api.errors import Malformed
from api.http.bodies import parse_json

PROTOBUF = "application/x-protobuf"

#: Only the first mistake in a list is reported: a list may hold millions.
Floats = Annotated[list[float], Field(fail_fast=True)]
Integers = Annotated[list[Integer], Field(fail_fast=True)]


class _Tensor(Request):
    """`data` are flat numbers; of a sparse tensor only the listed ones. Nothing is expanded here."""

    data: Floats
    dtype: Literal["int64", "float32"]
    shape: Integers | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class _Datum(Request):
    model_input: ModelInput
    loss_fn_inputs: dict[str, _Tensor]


class _Input(Request):
    data: Annotated[list[_Datum], Field(fail_fast=True)]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Body(Request):
    """A body with one of the two inputs; `forward` only names its input differently."""

    forward_backward_input: _Input | None = None
    forward_input: _Input | None = None
    model_id: str
    seq_id: Integer
    type: str | None = None


def train_body(raw: bytes, forward_only: bool) -> bytes:
    """The protobuf of a JSON forward or forward_backward. Raises Malformed naming the field."""
    body = parse_json(raw, _Body)
    name = "forward_input" if forward_only else "forward_backward_input"
    given = body.forward_input if forward_only else body.forward_backward_input
    if given is None:
        raise Malformed(f"{name}: Field required")
    message = pb.ForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=given.loss_fn, forward_only=forward_only
    )
    write_config(message, given.loss_fn_config or {})
    for index, datum in enumerate(given.data):
        written = message.data.add()
        for number, chunk in enumerate(datum.model_input.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise Malformed(f"data.{index}.model_input.chunks.{number}: {chunk.type} chunks cannot be trained on")
            written.model_input.add().encoded_text.tokens = np.asarray(chunk.tokens, dtype=INT32).tobytes()
        for key, tensor in datum.loss_fn_inputs.items():
            _write(written.loss_fn_inputs[key], tensor, f"data.{index}.loss_fn_inputs.{key}")
    return message.SerializeToString()


def _write(message: pb.Tensor, tensor: _Tensor, where: str) -> None:
    try:
        values = values_of(tensor.data, tensor.dtype)
        message.dtype = pb.DTYPE_INT64 if tensor.dtype == "int64" else pb.DTYPE_FLOAT32
        message.shape.extend(tensor.shape or [])
        if (tensor.sparse_crow_indices is None) != (tensor.sparse_col_indices is None):
            raise Malformed(f"{where}: sparse_crow_indices and sparse_col_indices come together")
        if tensor.sparse_crow_indices is None:
            message.dense = values.tobytes()
            return
        message.sparse_csr.values = values.tobytes()
        message.sparse_csr.crow_indices = np.asarray(tensor.sparse_crow_indices, dtype=INT64).tobytes()
        message.sparse_csr.col_indices = np.asarray(tensor.sparse_col_indices, dtype=INT64).tobytes()
    except (ValueError, OverflowError) as error:
        raise Malformed(f"{where}: {error}") from None


def only_json(accept: str) -> bool:
    """True if a client with this Accept header cannot read protobuf. Clients without the header, or with */*, can."""
    return "json" in accept and "protobuf" not in accept


def train_result(payload: bytes) -> dict[str, Any]:
    """A ForwardBackwardOutput as JSON. Metrics that are not finite are null, since JSON lacks them."""
    outputs, metrics = decode_train_output(payload)
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {name: TensorData.from_numpy(array).to_json() for name, array in row.items()} for row in outputs
        ],
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }


def sample_result(payload: bytes) -> dict[str, Any]:
    """A SampleResponse as JSON; parts that were not asked for are left out."""
    result = decode_sample_response(payload)
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens.tolist(),
                "logprobs": None if sequence.logprobs is None else sequence.logprobs.tolist(),
                **({} if sequence.topk is None else {"topk_logprobs": sequence.topk.tolist()}),
                **({"stale": True} if sequence.stale else {}),
                **({} if sequence.routed_experts is None else {"routed_experts": sequence.routed_experts.tolist()}),
            }
            for sequence in result.sequences
        ],
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
    }
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if math.isnan(x) else x for x in result.prompt_logprobs.tolist()]
    if result.topk_prompt_logprobs is not None:
        found["topk_prompt_logprobs"] = result.topk_prompt_logprobs.tolist()
    if result.target_prompt_logprobs is not None:
        found["target_prompt_logprobs"] = result.target_prompt_logprobs.to_json()
    if result.prompt_alt_tokens is not None:
        both = zip(("tokens", "logprobs"), result.prompt_alt_tokens, strict=True)
        found["prompt_alt_tokens"] = {name: TensorData.from_numpy(array).to_json() for name, array in both}
    return found
