"""Bodies and results of forward and forward_backward: protobuf bytes to plain arrays and back.

Malformed bytes raise `WireError` naming the datum and field; nothing else gets out. What the values mean (vocabulary,
lengths that must agree, finite numbers) is the server's to judge, not the wire's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import (
    INT32,
    INT64,
    Array,
    check_shape,
    public_code,
    read_flat,
    read_tensor,
    stored_dtype,
    to_public,
    widen,
    write_tensor,
)
from weft.wire.binary.message import read_message
from weft.wire.error import WireError
from weft.wire.inputs import PromptProvenanceSpan, ProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan


@dataclass(frozen=True)
class ArrayDatum:
    """One datum: the model's input tokens int32 [T] and, by name, the loss's inputs, float32 or int64, dense. Spans,
    where given, say of what samples the tokens and targets are copies."""

    tokens: npt.NDArray[np.int32]
    inputs: dict[str, Array]
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None


@dataclass(frozen=True)
class TrainBatch:
    """A forward or forward_backward operation. `seq_id` starts at 1 within a run."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    data: list[ArrayDatum] = field(default_factory=list)


def decode_train_request(body: bytes) -> TrainBatch:
    """Read a ForwardBackwardRequest. Every array is fresh, writable and dense (sparse ones are expanded)."""
    message = read_message(body, pb.ForwardBackwardRequest)
    return TrainBatch(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        loss_fn_config=_read_config(message),
        forward_only=message.forward_only,
        data=[_read_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)],
    )


def _read_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        arm = value.WhichOneof("value")
        if arm is None:
            raise WireError(f"loss_fn_config[{name!r}] has no value")
        config[name] = value.number if arm == "number" else value.text
    return config


def _read_datum(datum: pb.Datum, where: str) -> ArrayDatum:
    parts = [_read_chunk(chunk, f"{where}.model_input[{index}]") for index, chunk in enumerate(datum.model_input)]
    tokens = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=INT32), *parts])
    inputs = {
        name: read_tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]") for name, tensor in datum.loss_fn_inputs.items()
    }
    return ArrayDatum(
        tokens=tokens,
        inputs=inputs,
        model_input_spans=[_read_span(s, f"{where}.model_input_spans") for s in datum.model_input_spans] or None,
        loss_fn_input_spans=[_read_span(s, f"{where}.loss_fn_input_spans") for s in datum.loss_fn_input_spans] or None,
    )


def _read_span(span: pb.ProvenanceSpan, where: str) -> ProvenanceSpan:
    arm = span.WhichOneof("span")
    if arm is None:
        raise WireError(f"{where}: a span is neither prompt_tokens nor sampled_tokens")
    found = span.sampled_tokens if arm == "sampled_tokens" else span.prompt_tokens
    kind = SampledProvenanceSpan if arm == "sampled_tokens" else PromptProvenanceSpan
    read = kind(sequence_id=found.sequence_id, offset=found.offset, length=found.length)
    check_span(read, where)
    return read


def check_span(span: ProvenanceSpan, where: str) -> None:
    if not span.sequence_id or span.offset < 0 or span.length < 0:
        raise WireError(
            f"{where}: a span needs a sequence_id, and offset and length of at least 0; "
            f"got {span.sequence_id!r:.80}, {span.offset}, {span.length}"
        )


def write_span(message: pb.ProvenanceSpan, span: ProvenanceSpan) -> None:
    arm = message.sampled_tokens if isinstance(span, SampledProvenanceSpan) else message.prompt_tokens
    arm.sequence_id, arm.offset, arm.length = span.sequence_id, span.offset, span.length


def _read_chunk(chunk: pb.Chunk, where: str) -> npt.NDArray[np.int32]:
    arm = chunk.WhichOneof("chunk")
    if arm != "encoded_text":
        raise WireError(f"{where}: {arm or 'empty'} chunks are not supported; send encoded_text")
    tokens = read_flat(chunk.encoded_text.tokens, INT32, where).astype(np.int32, copy=False)
    if tokens.size and tokens.min() < 0:
        raise WireError(f"{where}: token {tokens.min()} at position {int(tokens.argmin())} is negative")
    return tokens


def encode_train_request(batch: TrainBatch) -> bytes:
    """The inverse of `decode_train_request` (dense tensors only)."""
    message = pb.ForwardBackwardRequest(
        model_id=batch.model_id, seq_id=batch.seq_id, loss_fn=batch.loss_fn, forward_only=batch.forward_only
    )
    write_config(message, batch.loss_fn_config)
    for index, datum in enumerate(batch.data):
        written = message.data.add()
        written.model_input.add().encoded_text.tokens = np.ascontiguousarray(datum.tokens, dtype=INT32).tobytes()
        for name, array in datum.inputs.items():
            write_tensor(written.loss_fn_inputs[name], array, f"data[{index}].loss_fn_inputs[{name!r}]")
        for span in datum.model_input_spans or []:
            write_span(written.model_input_spans.add(), span)
        for span in datum.loss_fn_input_spans or []:
            write_span(written.loss_fn_input_spans.add(), span)
    return message.SerializeToString()


def write_config(message: pb.ForwardBackwardRequest, config: Mapping[str, float | str]) -> None:
    """Numbers go into both maps, because older servers read only the first; strings fit only the second. Raises
    TypeError for what is neither."""
    for name, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        elif not hasattr(value, "__float__"):
            raise TypeError(f"loss_fn_config[{name!r}] must be a number or a text, got {value!r:.80}")
        else:
            message.loss_fn_config[name] = float(value)
            message.loss_fn_config_v2[name].number = float(value)


def encode_train_output(outputs: Sequence[Mapping[str, npt.ArrayLike]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. `outputs[i]` holds arrays [T, ...] of datum i; all data have the same field names.

    A record holds consecutive data whose fields agree in dtype and trailing shape, so ragged second axes make several.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    rows = [{name: to_public(array, f"output {name!r}") for name, array in output.items()} for output in outputs]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise WireError("every datum's output must have the same field names")
    for layout, group in groupby(rows, key=_layout):
        _write_record(message.loss_fn_outputs.add(), list(group), layout)
    for name, value in metrics.items():
        message.metrics[name] = float(value)
    return message.SerializeToString()


_Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


def _layout(row: Mapping[str, Array]) -> _Layout:
    for name, array in row.items():
        if array.ndim == 0 or 0 in array.shape[1:]:
            raise WireError(f"output {name!r} of shape {array.shape} has no leading dimension to divide by datum")
    return tuple((name, array.dtype.kind, array.shape[1:]) for name, array in sorted(row.items()))


def _write_record(record: pb.ArrayRecord, rows: list[dict[str, Array]], layout: _Layout) -> None:
    record.type_tag = "ArrayRecord"
    record.num_datums = len(rows)
    for name, _, trailing in layout:
        arrays = [row[name] for row in rows]
        batched = record.fields[name]
        batched.dtype = public_code(arrays[0])
        batched.trailing_shape.extend(trailing)
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=INT64).tobytes()


def decode_train_output(body: bytes) -> tuple[list[dict[str, Array]], dict[str, float]]:
    """Outputs per datum, arrays [T, *trailing] by field name, and metrics."""
    message = read_message(body, pb.ForwardBackwardOutput)
    outputs: list[dict[str, Array]] = []
    for number, record in enumerate(message.loss_fn_outputs):
        outputs.extend(_read_record(record, f"loss_fn_outputs[{number}]"))
    return outputs, dict(message.metrics)


def _read_record(record: pb.ArrayRecord, where: str) -> list[dict[str, Array]]:
    columns = {name: _read_batched(batched, f"{where}.{name}") for name, batched in record.fields.items()}
    lengths = {len(column) for column in columns.values()}
    count = record.num_datums or max(lengths, default=0)
    if not 0 <= count <= 2**31 or lengths - {count}:
        raise WireError(f"{where}: {count} data, but its fields hold {sorted(lengths)}")
    return [{name: column[index] for name, column in columns.items()} for index in range(count)]


def _read_batched(batched: pb.BatchedTensor, where: str) -> list[Array]:
    stored = stored_dtype(batched.dtype, where)
    trailing = list(batched.trailing_shape)
    check_shape(trailing, where)
    row_bytes = int(np.prod(trailing, dtype=np.int64)) * stored.itemsize
    offsets = read_flat(batched.offsets, INT64, f"{where} offsets").astype(np.int64)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != len(batched.data) or np.any(np.diff(offsets) < 0):
        raise WireError(f"{where}: offsets must rise from 0 to {len(batched.data)}")
    if row_bytes == 0 or np.any(offsets % row_bytes):
        raise WireError(f"{where}: offsets do not fall on rows of {row_bytes} bytes (trailing shape {trailing})")
    flat = widen(read_flat(batched.data, stored, where), batched.dtype).reshape(-1, *trailing)
    starts = (offsets // row_bytes).tolist()
    return [flat[start:stop] for start, stop in pairwise(starts)]
