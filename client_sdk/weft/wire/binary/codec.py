"""The binary half of the wire, in numpy: what workers and the API decode and encode. See `weft_wire.proto`."""

from __future__ import annotations

from weft.wire.binary.arrays import Array
from weft.wire.binary.sample_codec import (
    EMPTY_LOGPROB,
    EMPTY_TOKEN,
    SampleResult,
    SequenceResult,
    TopkLogprobs,
    decode_sample_response,
    encode_sample_response,
)
from weft.wire.binary.train_codec import (
    ArrayDatum,
    TrainBatch,
    decode_train_output,
    decode_train_request,
    encode_train_output,
    encode_train_request,
)
from weft.wire.error import WireError

__all__ = [
    "EMPTY_LOGPROB",
    "EMPTY_TOKEN",
    "Array",
    "ArrayDatum",
    "SampleResult",
    "SequenceResult",
    "TopkLogprobs",
    "TrainBatch",
    "WireError",
    "decode_sample_response",
    "decode_train_output",
    "decode_train_request",
    "encode_sample_response",
    "encode_train_output",
    "encode_train_request",
]
