"""The codec: what it reads and writes, and that it raises only `WireError`, whatever the bytes."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from packaging.requirements import Requirement
from weft.wire import TensorData
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.sample_codec import SequenceResult, TopkLogprobs, decode_sample_response, encode_sample_response
from weft.wire.binary.train_codec import (
    ArrayDatum,
    TrainBatch,
    decode_train_output,
    decode_train_request,
    encode_train_output,
    encode_train_request,
)
from weft.wire.error import WireError

from tests.search import examples


def int64(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def float32(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_the_oldest_protobuf_that_the_client_takes_loads_the_messages() -> None:
    """Protobuf refuses messages that a newer protoc has generated: `import weft` would fail."""
    written = re.search(r"# Protobuf Python Version: ([\d.]+)", Path(pb.__file__).read_text())
    project = tomllib.loads((Path(__file__).parents[3] / "client_sdk/pyproject.toml").read_text())["project"]
    [needed] = [found for found in map(Requirement, project["dependencies"]) if found.name == "protobuf"]
    assert written is not None
    assert [(one.operator, one.version) for one in needed.specifier] == [(">=", written[1])]


def request_with(tensor: pb.Tensor) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = np.array([1], np.int32).tobytes()
    message.data.add().loss_fn_inputs["weights"].CopyFrom(tensor)
    return message.SerializeToString()


def csr(crow: bytes, col: bytes, values: bytes, shape: list[int]) -> pb.Tensor:
    sparse = pb.SparseCsr(values=values, crow_indices=crow, col_indices=col)
    return pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, sparse_csr=sparse)


GOOD = {"crow": int64(0, 1, 3), "col": int64(2, 0, 1), "values": float32(1, 2, 3), "shape": [2, 3]}


def test_sparse_becomes_dense() -> None:
    read = decode_train_request(request_with(csr(**GOOD))).data[1].inputs["weights"]  # type: ignore[arg-type]
    assert read.tolist() == [[0, 0, 1], [2, 3, 0]]
    assert read.flags.writeable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crow": int64(0, 1)}, "crow_indices has 2 entries, 2 rows need 3"),
        ({"crow": int64(0, 2, 1)}, "crow_indices must rise from 0 to the number of values, 3"),
        ({"crow": int64(-1, 1, 3)}, "crow_indices must rise"),
        ({"col": int64(3, 0, 1)}, r"col_indices must be in 0..2"),
        ({"col": int64(-1, 0, 1)}, r"col_indices must be in 0..2"),
        ({"col": int64(2, 1, 0)}, "col_indices must rise within each row"),
        ({"col": int64(2, 1, 1)}, "col_indices must rise within each row"),
        ({"col": int64(2, 0)}, "2 col_indices for 3 values"),
        ({"col": b"123"}, "3 bytes are not a whole number of 8-byte values"),
        ({"values": b"123"}, "3 bytes are not a whole number of 4-byte values"),
        ({"shape": [3]}, "needs a two-dimensional shape"),
        ({"shape": [2, 2**30]}, "expands to more than"),
        ({"shape": [2, 2**62]}, "larger than any tensor"),
        ({"shape": [2, -3]}, "negative dimension"),
    ],
)
def test_bad_csr_names_datum_and_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode_train_request(request_with(csr(**{**GOOD, **change})))  # type: ignore[arg-type]
    assert "data[1].loss_fn_inputs['weights']" in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (pb.Tensor(dense=b"1234"), "dtype 0 is unknown"),
        (pb.Tensor(dense=b"123", dtype=pb.DTYPE_INT32), "3 bytes are not a whole number of 4-byte values"),
        (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[2]), "needs 2 values, the bytes hold 1"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[0, -1]), "negative dimension"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[0, 2**50, 2**50]), "larger than any tensor"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[1] * 9), "9 dimensions"),
    ],
)
def test_bad_dense_names_datum_and_field(tensor: pb.Tensor, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode_train_request(request_with(tensor))
    assert "data[1].loss_fn_inputs['weights']" in str(caught.value)


def test_narrow_dtypes_widen() -> None:
    read = decode_train_request(request_with(pb.Tensor(dense=np.array([5, -1], "<i4").tobytes(), dtype=pb.DTYPE_INT32)))
    assert read.data[1].inputs["weights"].dtype == np.int64
    assert read.data[1].inputs["weights"].tolist() == [5, -1]
    words = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    tensor = pb.Tensor(dense=words.astype(np.uint16).tobytes(), dtype=pb.DTYPE_BFLOAT16, shape=[1, 2])
    assert decode_train_request(request_with(tensor)).data[1].inputs["weights"].tolist() == [[1.5, -2.0]]


def test_bad_chunks_name_datum_and_chunk() -> None:
    message = pb.ForwardBackwardRequest()
    message.data.add().model_input.add().encoded_text.tokens = np.array([3, -7], np.int32).tobytes()
    with pytest.raises(WireError, match=r"data\[0\]\.model_input\[0\]: token -7 at position 1 is negative"):
        decode_train_request(message.SerializeToString())
    message.data[0].model_input[0].image.data = b"png"
    with pytest.raises(WireError, match="image chunks are not supported"):
        decode_train_request(message.SerializeToString())
    message.data[0].model_input[0].Clear()
    with pytest.raises(WireError, match="empty chunks"):
        decode_train_request(message.SerializeToString())


def test_legacy_config_is_read_when_there_is_no_other() -> None:
    message = pb.ForwardBackwardRequest(loss_fn_config={"beta": 0.5})
    assert decode_train_request(message.SerializeToString()).loss_fn_config == {"beta": 0.5}
    message.loss_fn_config_v2["x"].SetInParent()
    with pytest.raises(WireError, match="'x'"):
        decode_train_request(message.SerializeToString())


arrays = st.one_of(
    st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda x: np.array(x, np.float32)),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda x: np.array(x, np.int64)),
    st.integers(1, 4).map(lambda k: np.arange(3 * k, dtype=np.float32).reshape(3, k)),
)
data = st.builds(
    ArrayDatum,
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda x: np.array(x, np.int32)),
    inputs=st.dictionaries(st.text(max_size=4), arrays, max_size=3),
)
batches = st.builds(
    TrainBatch,
    model_id=st.text(max_size=5),
    seq_id=st.integers(1, 2**31 - 1),
    loss_fn=st.text(max_size=5),
    loss_fn_config=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False) | st.text(max_size=3), max_size=3),
    forward_only=st.booleans(),
    data=st.lists(data, max_size=3),
)


@given(batches)
@settings(deadline=None)
def test_requests_come_back_as_they_were(batch: TrainBatch) -> None:
    read = decode_train_request(encode_train_request(batch))
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == (
        batch.model_id,
        batch.seq_id,
        batch.loss_fn,
        batch.forward_only,
    )
    assert read.loss_fn_config == batch.loss_fn_config
    for got, sent in zip(read.data, batch.data, strict=True):
        np.testing.assert_array_equal(got.tokens, sent.tokens)
        assert got.inputs.keys() == sent.inputs.keys()
        for name, array in sent.inputs.items():
            assert got.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(got.inputs[name], array)


@given(st.lists(st.integers(0, 3).flatmap(lambda n: st.sampled_from([(n,), (n, 1), (n, 2)])), max_size=6))
@settings(deadline=None)
def test_outputs_come_back_as_they_were(shapes: list[tuple[int, ...]]) -> None:
    outputs = [{"logprobs": np.full(shape, index, np.float32)} for index, shape in enumerate(shapes)]
    read, metrics = decode_train_output(encode_train_output(outputs, {"loss:sum": 2.0}))
    assert metrics == {"loss:sum": 2.0}
    assert len(read) == len(outputs)
    for got, sent in zip(read, outputs, strict=True):
        np.testing.assert_array_equal(got["logprobs"], sent["logprobs"])


def test_samples_come_back_as_they_were() -> None:
    topk = TopkLogprobs(np.array([[1, 2]], np.int32), np.array([[-1, -99999]], np.float32))
    routes = np.arange(12).reshape(3, 2, 2)
    sequence = SequenceResult(
        np.array([4], np.int32), np.array([-0.5], np.float32), "stop", topk, routed_experts=routes
    )
    targets = TensorData([-2.0, -3.0], "float32", [2, 9], [0, 1, 2], [8, 3])
    alternatives = (np.array([[5, 6, 5]]), np.array([[-1, -2, -1]], np.float32))
    body = encode_sample_response(
        [sequence], np.array([np.nan, -1], np.float32), 3, topk, targets, prompt_alt_tokens=alternatives
    )
    read = decode_sample_response(body)
    assert read.prompt_cache_hit_tokens == 3
    assert read.sequences[0].stop_reason == "stop"
    assert read.sequences[0].topk is not None
    assert read.sequences[0].routed_experts is not None
    np.testing.assert_array_equal(read.sequences[0].routed_experts, routes)
    assert read.sequences[0].topk.tolist() == [[(1, -1.0)]]
    assert read.target_prompt_logprobs is not None
    assert read.target_prompt_logprobs.to_json() == targets.to_json()
    assert read.prompt_alt_tokens is not None
    for got, sent in zip(read.prompt_alt_tokens, alternatives, strict=True):
        np.testing.assert_array_equal(got, sent)
    np.testing.assert_array_equal(read.prompt_logprobs, np.array([np.nan, -1], np.float32))


MESSAGES = [
    (decode_train_request, request_with(csr(**GOOD))),  # type: ignore[arg-type]
    (decode_train_output, encode_train_output([{"logprobs": np.ones((2, 2), np.float32)}], {"a:sum": 1.0})),
    (decode_sample_response, encode_sample_response([SequenceResult(np.ones(2, np.int32), None, "stop")])),
]


@pytest.mark.parametrize(("decode", "good"), MESSAGES)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6), cut=st.integers(0, 200))
@settings(max_examples=examples(300), deadline=None)
def test_damaged_bytes_raise_only_wire_errors(
    decode: object, good: bytes, edits: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(good)
    for position, value in edits:
        damaged[position % len(damaged)] = value
    for body in (bytes(damaged), bytes(damaged[:cut])):
        try:
            decode(body)  # type: ignore[operator]
        except WireError as error:
            assert str(error)  # noqa: PT017


@pytest.mark.parametrize("decode", [decode_train_request, decode_train_output, decode_sample_response])
@given(body=st.binary(max_size=200))
@settings(max_examples=examples(200), deadline=None)
def test_random_bytes_raise_only_wire_errors(decode: object, body: bytes) -> None:
    try:
        decode(body)  # type: ignore[operator]
    except WireError as error:
        assert str(error)  # noqa: PT017


dims = st.integers(-2, 4) | st.sampled_from([2**31, 2**62, -(2**63), 2**63 - 1])


@given(
    shape=st.lists(dims, max_size=4),
    dtype=st.sampled_from([0, 1, 2, 3, 4]),
    crow=st.lists(dims, max_size=5),
    col=st.lists(dims, max_size=5),
    values=st.binary(max_size=24),
    sparse=st.booleans(),
)
@settings(max_examples=examples(500), deadline=None)
def test_any_tensor_reads_to_its_shape_or_raises(
    shape: list[int], dtype: int, crow: list[int], col: list[int], values: bytes, sparse: bool
) -> None:
    tensor = pb.Tensor(dtype=dtype, shape=shape)  # type: ignore[arg-type]
    if sparse:
        tensor.sparse_csr.values = values
        tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = int64(*crow), int64(*col)
    else:
        tensor.dense = values
    try:
        read = decode_train_request(request_with(tensor)).data[1].inputs["weights"]
    except WireError:
        return
    assert list(read.shape) == (shape or [read.size])


def test_decoding_is_a_copy_not_a_loop() -> None:
    """Two million tokens with targets and advantages, 40 MB: a Python loop over them would take seconds."""
    tokens = np.arange(2**21, dtype=np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64), "advantages": np.zeros(2**21, np.float32)}
    body = encode_train_request(TrainBatch("m", 1, "ppo", data=[ArrayDatum(tokens, inputs)]))
    began = time.process_time()
    decode_train_request(body)
    assert time.process_time() - began < 0.5
