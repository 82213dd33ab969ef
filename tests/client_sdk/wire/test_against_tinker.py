"""Our bytes are Tinker's: we read what its SDK writes, and it reads what we write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker import types as tinker_types
from tinker.proto import tinker_public_pb2 as tinker_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.sample_codec import (
    PolicySpan,
    SequenceResult,
    TopkLogprobs,
    decode_sample_response,
    encode_sample_response,
)
from weft.wire.binary.train_codec import (
    ArrayDatum,
    TrainBatch,
    decode_train_request,
    encode_train_output,
    encode_train_request,
)

MESSAGES = [
    "ForwardBackwardRequest",
    "LossConfigValue",
    "Datum",
    "ProvenanceSpan",
    "Chunk",
    "EncodedTextChunk",
    "ImageChunk",
    "DmelChunk",
    "SparseCsr",
    "Tensor",
    "ForwardBackwardOutput",
    "ArrayRecord",
    "BatchedTensor",
    "SampleResponse",
    "SampledSequence",
    "TopkLogprobs",
    "PromptAltTokens",
]


#: Fields that Tinker does not have get numbers beyond this.
FIRST_OWN_FIELD = 1000


@pytest.mark.parametrize("name", MESSAGES)
def test_field_numbers_and_types_are_tinkers(name: str) -> None:
    def fields(module: object) -> set[tuple[str, int, int, bool]]:
        descriptor = getattr(module, name).DESCRIPTOR
        return {(field.name, field.number, field.type, field.is_repeated) for field in descriptor.fields}

    own = {field for field in fields(pb) if field[1] > FIRST_OWN_FIELD}
    assert fields(pb) - own == fields(tinker_pb)


def test_tinker_skips_our_own_fields() -> None:
    tokens = np.array([4, 5], np.int32)
    sequence = SequenceResult(tokens, None, "length", policy=(PolicySpan(3, 2),), stale=True)
    body = encode_sample_response([sequence])
    read = tinker_pb.SampleResponse.FromString(body)
    assert read.sequences[0].tokens == tokens.tobytes()
    assert decode_sample_response(body).sequences[0].policy == (PolicySpan(3, 2),)
    assert decode_sample_response(body).sequences[0].stale


def tinker_request() -> tinker_types.ForwardBackwardRequest:
    """Two data: one plain, one with two-dimensional targets that Tinker sends as CSR."""
    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[1, 3], targets[4, 0] = 7, 9
    weights = torch.zeros(6, 8)
    weights[1, 3] = 0.5
    two = tinker_types.ModelInput(
        chunks=[tinker_types.EncodedTextChunk(tokens=[5, 6]), tinker_types.EncodedTextChunk(tokens=[7, 8, 9, 1])]
    )
    data = [
        tinker_types.Datum(
            model_input=tinker_types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "advantages": [0.5, -1.0, 2.0]},
        ),
        tinker_types.Datum(model_input=two, loss_fn_inputs={"target_tokens": targets, "weights": weights}),
    ]
    return tinker_types.ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=3,
        forward_backward_input=tinker_types.ForwardBackwardInput(
            data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9, "loss_id": "x"}
        ),
    )


def test_reads_what_tinker_writes() -> None:
    batch = decode_train_request(forward_backward_request_to_proto(tinker_request()).SerializeToString())

    assert (batch.model_id, batch.seq_id, batch.loss_fn, batch.forward_only) == ("s:train:0", 3, "ppo", False)
    assert batch.loss_fn_config == {"clip_low_threshold": 0.9, "loss_id": "x"}
    plain, sparse = batch.data
    assert plain.tokens.dtype == np.int32
    assert plain.tokens.tolist() == [1, 2, 3]
    assert plain.inputs["target_tokens"].dtype == np.int64
    assert plain.inputs["advantages"].tolist() == [0.5, -1.0, 2.0]
    assert sparse.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert sparse.inputs["target_tokens"].shape == (6, 8)
    assert sparse.inputs["target_tokens"].sum() == 16
    assert sparse.inputs["target_tokens"][4, 0] == 9
    assert sparse.inputs["weights"][1, 3] == 0.5
    assert sparse.inputs["weights"].dtype == np.float32


def test_tinker_reads_our_request() -> None:
    batch = TrainBatch(
        model_id="s:train:0",
        seq_id=3,
        loss_fn="cispo",
        loss_fn_config={"clip_high_threshold": 4.0},
        data=[ArrayDatum(np.array([1, 2], np.int32), {"target_tokens": np.array([2, 3])})],
    )
    message = tinker_pb.ForwardBackwardRequest.FromString(encode_train_request(batch))

    assert message.loss_fn_config_v2["clip_high_threshold"].number == 4.0
    assert message.data[0].model_input[0].encoded_text.tokens == np.array([1, 2], np.int32).tobytes()
    assert message.data[0].loss_fn_inputs["target_tokens"].dtype == tinker_pb.DTYPE_INT64


def test_tinker_reads_our_outputs_even_when_ragged() -> None:
    outputs = [
        {"logprobs": np.array([-1.0, -2.0], np.float32)},
        {"logprobs": np.array([-3.0], np.float32)},
        {"logprobs": np.array([[-4.0, -5.0], [-6.0, -7.0]], np.float32)},
    ]
    read = deserialize_forward_backward_output(encode_train_output(outputs, {"loss:sum": 1.5}))

    assert read.metrics == {"loss:sum": 1.5}
    assert [output["logprobs"].tolist() for output in read.loss_fn_outputs] == [
        [-1.0, -2.0],
        [-3.0],
        [[-4.0, -5.0], [-6.0, -7.0]],
    ]
    assert deserialize_forward_backward_output(encode_train_output([], {})).loss_fn_outputs == []


def test_tinker_reads_our_samples() -> None:
    topk = TopkLogprobs(np.array([[4, 5], [0, 0]], np.int32), np.array([[-1, -2], [-99999, -99999]], np.float32))
    body = encode_sample_response(
        [
            SequenceResult(np.array([4, 9], np.int32), np.array([-0.5, -1.5], np.float32), "stop", topk),
            SequenceResult(np.array([7], np.int32), np.array([-2.0], np.float32), "length"),
        ],
        prompt_logprobs=np.array([np.nan, -3.0], np.float32),
        prompt_cache_hit_tokens=1,
    )
    read = deserialize_sample_response(body)

    assert [(s.tokens, s.logprobs, s.stop_reason) for s in read.sequences] == [
        ([4, 9], [-0.5, -1.5], "stop"),
        ([7], [-2.0], "length"),
    ]
    assert read.prompt_logprobs == [None, -3.0]
    assert read.prompt_cache_hit_tokens == 1
    assert read.sequences[0].topk_logprobs == [[(4, -1.0), (5, -2.0)], None]
