"""The client's half of a forward or forward_backward: `Datum` to protobuf, and its result to `ForwardBackwardOutput`.

Sparse tensors stay sparse on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import INT32
from weft.wire.binary.train_codec import ArrayDatum, check_span, decode_train_output, write_config, write_span
from weft.wire.error import WireError
from weft.wire.inputs import Datum, DmelChunk, EncodedTextChunk, ImageChunk, ModelInputChunk
from weft.wire.tensor import TensorData, write_tensor_data
from weft.wire.training import ForwardBackwardOutput, ForwardBackwardRequest


def encode_forward_backward(request: ForwardBackwardRequest) -> bytes:
    """The body of a forward_backward POST."""
    given = request.forward_backward_input
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=given.loss_fn, forward_only=request.forward_only
    )
    config: Mapping[str, float | str] = given.loss_fn_config or {}
    write_config(message, config)
    for index, datum in enumerate(given.data):
        _write_datum(message.data.add(), datum, f"data[{index}]")
    return message.SerializeToString()


def as_decoded(datum: Datum) -> ArrayDatum:
    """The datum as the server will decode it. Raises `WireError` for a datum that cannot be sent, or that the server
    could not read."""
    inputs = {name: np.atleast_1d(tensor.to_numpy()) for name, tensor in datum.loss_fn_inputs.items()}
    tokens = np.asarray(datum.model_input.to_ints(), dtype=np.int32)
    spans = datum.model_input_spans, datum.loss_fn_input_spans
    for name, given in zip(("model_input_spans", "loss_fn_input_spans"), spans, strict=True):
        for span in given or []:
            check_span(span, name)
    # empty lists of spans do not exist on the wire
    return ArrayDatum(tokens, inputs, *(given or None for given in spans))


def _write_datum(message: pb.Datum, datum: Datum, where: str) -> None:
    for index, chunk in enumerate(datum.model_input.chunks):
        _write_chunk(message.model_input.add(), chunk, f"{where}.model_input[{index}]")
    for name, tensor in datum.loss_fn_inputs.items():
        write_tensor_data(message.loss_fn_inputs[name], tensor)
    for span in datum.model_input_spans or []:
        write_span(message.model_input_spans.add(), span)
    for span in datum.loss_fn_input_spans or []:
        write_span(message.loss_fn_input_spans.add(), span)


def _write_chunk(message: pb.Chunk, chunk: ModelInputChunk, where: str) -> None:
    if isinstance(chunk, EncodedTextChunk):
        message.encoded_text.tokens = np.asarray(chunk.tokens, dtype=INT32).tobytes()
    elif isinstance(chunk, ImageChunk):
        message.image.data, message.image.format = chunk.data, chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise WireError(f"{where}: {chunk.type} chunks can only be sampled from, not trained on")


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """The result of a forward or forward_backward, as users see it."""
    rows, metrics = decode_train_output(body)
    outputs = [{name: TensorData.from_numpy(array) for name, array in row.items()} for row in rows]
    return ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics=metrics)


def estimate_bytes(data: Sequence[Datum]) -> list[int]:
    """About how many bytes each datum takes on the wire: 4 per token, its values, 8 per sparse index."""
    return [_estimate(datum) for datum in data]


def _estimate(datum: Datum) -> int:
    size = 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            size += 4 * chunk.length
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
    for tensor in datum.loss_fn_inputs.values():
        indices = len(tensor.sparse_crow_indices or []) + len(tensor.sparse_col_indices or [])
        size += tensor.values.nbytes + 8 * indices
    return size
