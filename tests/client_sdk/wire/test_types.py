"""The wire types: what users may pass, and the JSON that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import weft
from pydantic import ValidationError
from tinker import types as tinker_types
from weft import types
from weft.wire.binary.request_codec import encode_forward_backward


def test_importing_weft_is_light() -> None:
    """The server imports weft.wire, and users import weft in every process: no torch, no transformers, no HTTP."""
    heavy = ["torch", "transformers", "httpx", "rich", "fastapi", "sqlalchemy"]
    code = f"import sys, weft, weft.wire, weft.types; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    code = "import sys, weft; weft.ServiceClient; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


#: Names of tinker.types that Weft's protocol has no use for.
ABSENT = {
    "AuditLogEntry", "AuditLogResponse", "AuthTokenResponse", "GetBillingUsageRequest", "BillingEventInfo",
    "BillingUsageEvent", "BillingUsageResponse", "BillingUsageSession", "CheckpointBillingEvent",
    "SamplingPrefillBillingEvent", "SamplingSampleBillingEvent", "StorageBillingEvent", "TrainingBillingEvent",
    "CreateCustomLossRequest", "CreateCustomLossResponse", "CustomLossGraph", "CustomLossInput",
    "CustomLossInputRank", "CustomLossNode", "DimuonOptimizerConfig", "DimuonParams", "OptimParams",
    "GetCurrentCheckpointStorageUsageRequest", "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse", "EventType", "ForwardRequest", "FutureCompletion", "FutureFailed",
    "FutureFinished", "FutureRetrieveResponse", "FuturesRetrieveRequest", "FuturesRetrieveResponse",
    "SamplingSessionFuturesTarget", "SearchOwner", "OwnSearchOwner", "AccessibleSearchOwner", "UserSearchOwner",
    "SessionEndEvent", "SessionStartEvent", "SessionSearchCursor", "SessionSearchRequest", "SessionSearchResponse",
    "ClientSessionFinished", "ClientSessionFinishErrored", "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason", "ClientSessionFinishSuccess", "ClientSessionFinishReasonType", "SessionActive",
    "SessionCancelled", "SessionFailed", "SessionFailedReason", "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason", "SessionFailedTrainingRunReason", "SessionStatus", "SessionStatusQuery",
    "ActiveSessionStatusQuery", "CancelledSessionStatusQuery", "ClientFinishedSessionStatusQuery",
    "FailedSessionStatusQuery", "SaveWeightsExternalResponseInternal",
    "SessionSummary", "Severity", "TelemetryBatch", "TelemetryEvent",
    "UnhandledExceptionEvent", "UnloadModelRequest", "UnloadModelResponse", "WhoamiResponse",
}  # fmt: skip


def test_every_other_name_of_tinker_types_is_there() -> None:
    theirs = {name for name in vars(tinker_types) if name[0].isupper()}
    assert theirs - ABSENT - set(vars(types)["__all__"]) == set()
    assert weft.Datum is types.Datum


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (types.AdamParams(), tinker_types.AdamParams()),
        (types.LoraConfig(rank=4, seed=1), tinker_types.LoraConfig(rank=4, seed=1)),
        (types.SamplingParams(stop=[1, 2]), tinker_types.SamplingParams(stop=[1, 2])),
        (types.SamplingParams(stop="x"), tinker_types.SamplingParams(stop="x")),
        (types.ModelInput.from_ints([1, 2]), tinker_types.ModelInput.from_ints([1, 2])),
        (
            types.SaveWeightsRequest(model_id="m", path="n", seq_id=1),
            tinker_types.SaveWeightsRequest(model_id="m", path="n", seq_id=1),
        ),
        (
            types.SampleRequest(
                prompt=types.ModelInput.from_ints([1]), sampling_params=types.SamplingParams(), seq_id=0
            ),
            tinker_types.SampleRequest(
                prompt=tinker_types.ModelInput.from_ints([1]), sampling_params=tinker_types.SamplingParams(), seq_id=0
            ),
        ),
        (
            types.OptimStepRequest(model_id="m", adam_params=types.AdamParams(), seq_id=2),
            tinker_types.OptimStepRequest(model_id="m", optim_params=tinker_types.AdamParams(), seq_id=2),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bodies_are_tinkers(ours: types.AdamParams, theirs: tinker_types.AdamParams) -> None:
    assert ours.body() == json.loads(theirs.model_dump_json(exclude_none=True))


def test_protobuf_of_a_request_is_tinkers() -> None:
    from tinker.proto import tinker_public_pb2
    from tinker.proto.request_conv import forward_backward_request_to_proto

    from tests.client_sdk.wire.test_against_tinker import tinker_request

    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[1, 3], targets[4, 0] = 7, 9
    weights = torch.zeros(6, 8)
    weights[1, 3] = 0.5
    two = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5, 6]), types.EncodedTextChunk(tokens=[7, 8, 9, 1])])
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "advantages": [0.5, -1.0, 2.0]},
        ),
        types.Datum(model_input=two, loss_fn_inputs={"target_tokens": targets, "weights": weights}),
    ]
    config = {"clip_low_threshold": 0.9, "loss_id": "x"}
    given = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    body = encode_forward_backward(types.ForwardBackwardRequest(given, "s:train:0", 3))

    assert tinker_public_pb2.ForwardBackwardRequest.FromString(body) == forward_backward_request_to_proto(
        tinker_request()
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: types.AdamParams(lr=1e-3), "lr\n.*not permitted"),  # type: ignore[call-arg]
        (lambda: types.AdamParams(learning_rate=-1), "learning_rate"),
        (lambda: types.AdamParams(beta1=1.0), "beta1"),
        (lambda: types.AdamParams(eps=float("nan")), "eps"),
        (lambda: types.LoraConfig(rank=0), "rank"),
        (lambda: types.LoraConfig(rank=1, train_mlp=False, train_attn=False, train_unembed=False), "at least one"),
        (lambda: types.ModelInput.from_ints([1, -2]), r"tokens\[1\]"),
        (lambda: types.OptimStepRequest(model_id="m"), "exactly one"),
        (lambda: types.LoadWeightsRequest(path="p", optimizer=False), "give either model_id"),
        (lambda: types.SaveWeightsForSamplerRequest(model_id="m"), "exactly one"),
        (lambda: types.SaveWeightsRequest(model_id="m", path="../x"), "path"),
        (lambda: types.SaveWeightsRequest(model_id="m", path="x", ttl_seconds=60), "ttl_seconds"),
    ],
)
def test_wrong_fields_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_responses_ignore_what_they_do_not_know() -> None:
    assert types.CreateModelResponse.model_validate({"model_id": "m", "new": 1}).model_id == "m"


def test_tensor_data() -> None:
    tensor = types.TensorData.from_torch(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))
    assert (tensor.dtype, tensor.shape, tensor.data, tensor.tolist()) == ("float32", [1, 2], [1.0, 2.0], [[1.0, 2.0]])
    assert types.TensorData.from_torch(torch.tensor([[0.0, 2.0]]).to_sparse_coo()).tolist() == [[0.0, 2.0]]
    assert types.TensorData(data=[1, 2], dtype="int64").to_torch().dtype == torch.int64
    assert types.TensorData(data=[1, 2], dtype="int64") == types.TensorData.from_numpy(np.array([1, 2], np.int32))
    source = np.zeros(2, np.float32)
    kept = types.TensorData.from_numpy(source)
    source[0] = 5
    assert kept.data == [0.0, 0.0]
    sparse = types.TensorData.from_dense(np.eye(5))
    assert sparse.sparse_crow_indices == [0, 1, 2, 3, 4, 5]
    assert sparse.to_numpy().tolist() == np.eye(5).tolist()
    assert sparse.to_torch().tolist() == np.eye(5).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: types.TensorData([1.0], "float64"),  # type: ignore[arg-type]
        lambda: types.TensorData([1.0, 2.0], "float32", [3]),
        lambda: types.TensorData([[1.0], [2.0, 3.0]], "float32"),
        lambda: types.TensorData([1.0], "float32", [1, 2], [0, 1]),
        lambda: types.TensorData([1.0], "float32", [1, 2], [0, 1], [2]),
        lambda: types.TensorData([2**70], "int64"),
        lambda: types.TensorData.from_numpy(np.array(["a"])),
        lambda: types.Datum(types.ModelInput.empty(), {"weights": "abc"}),  # type: ignore[dict-item]
        lambda: types.Datum(types.ModelInput.empty(), {"weights": [[1.0], [2.0, 3.0]]}),  # type: ignore[dict-item]
        lambda: types.Datum(types.ModelInput.empty(), {"weights": ["a"]}),  # type: ignore[dict-item]
    ],
)
def test_wrong_tensors(make: object) -> None:
    with pytest.raises(types.WireError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("weights", [1e39], "too large for float32"),
        ("weights", np.array([-1e39]), "too large for float32"),
        ("weights", types.TensorData([float("inf")], "float32"), None),
        ("target_tokens", np.array([2**63], np.uint64), "no 64-bit integers"),
        ("target_tokens", [0.5], "no 64-bit integers"),
        ("weights", ["0.5"], "not numbers"),
        ("weights", [None], "not numbers"),
    ],
)
def test_a_number_that_would_become_another_is_refused(name: str, value: Any, says: str | None) -> None:
    """1e39 was infinite, and 2**63 negative."""
    if says is None:
        assert types.Datum([], {name: value}).loss_fn_inputs[name] is value
        return
    with pytest.raises(types.WireError, match=f"^loss input '{name}': tensor holds values that are {says}"):
        types.Datum([], {name: value})


def test_inputs_have_names() -> None:
    with pytest.raises(types.WireError, match=r"^loss_fn_inputs has the key 1"):
        types.Datum([], {1: [1]})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [True, np.True_])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(types.AdamParams, "learning_rate"), (types.SamplingParams, "max_tokens"), (types.LoraConfig, "rank")],
)
def test_a_boolean_is_no_number(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n  must be a number, not true or false"):
        kind(**{field: value})


@pytest.mark.parametrize("tokens", [[True], [2.0], ["5"]])
def test_only_whole_numbers_are_tokens(tokens: Any) -> None:
    with pytest.raises(types.WireError, match=r"^tokens\[0\] is "):
        types.ModelInput.from_ints(tokens)


def test_lists_are_typed_by_name_and_else_by_their_values() -> None:
    given = {
        "weights": [1, 2],
        "target_tokens": (3, 4),
        "mine": [1, 0],
        "other": [[0.5], [1]],
        "sampling_temperature": 1,
    }
    inputs = types.Datum([], given).loss_fn_inputs
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in inputs.items()} == {
        "weights": ("float32", [1.0, 2.0]),
        "target_tokens": ("int64", [3, 4]),
        "mine": ("int64", [1, 0]),
        "other": ("float32", [[0.5], [1.0]]),
        "sampling_temperature": ("float32", [1.0]),
    }


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])], ids=repr)
def test_token_ids_are_taken_as_they_are(tokens: Any) -> None:
    whole = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2])])
    assert types.Datum(tokens, {"weights": [1, 1]}) == types.Datum(whole, {"weights": [1.0, 1.0]})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("abc", "model_input is text; give token ids"),
        ({"input_ids": [1]}, "model_input is a dict; give token ids .its 'input_ids'"),
        ([1, -2], r"model_input\[1\] is -2; token ids are integers from 0 to 2147483647"),
        ([[1, 2]], r"model_input\[0\] is \[1, 2\]"),
        (3, "model_input is a int"),
    ],
)
def test_what_is_no_prompt_is_named(tokens: Any, message: str) -> None:
    with pytest.raises(types.WireError, match=message):
        types.Datum(tokens)


def test_reprs_are_short() -> None:
    datum = types.Datum(list(range(5000)), {"target_tokens": list(range(5000)), "weights": [0.5] * 5000})
    assert len(repr(datum)) < 400
    assert "ModelInput([0, 1, 2, 3, 4, 5, ... 4994 more])" in repr(datum)
    assert (
        "'weights': TensorData([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ... 4994 more], dtype='float32', shape=[5000])"
        in repr(datum)
    )
    assert repr(types.ModelInput.from_ints([1])) == "ModelInput([1])"


def test_tensors_in_json() -> None:
    body = {"data": [1, 2], "dtype": "int64", "shape": [1, 2]}
    given = {"prompt": {"chunks": []}, "sampling_params": {}, "target_prompt_logprobs": body}
    request = types.SampleRequest.model_validate(given)
    assert request.target_prompt_logprobs is not None
    assert request.target_prompt_logprobs.tolist() == [[1, 2]]
    assert request.body()["target_prompt_logprobs"] == body
    for wrong in ({**body, "x": 1}, {**body, "shape": [3]}, {**body, "dtype": "float64"}, "tensor"):
        with pytest.raises(ValidationError, match="target_prompt_logprobs"):
            types.SampleRequest.model_validate({**given, "target_prompt_logprobs": wrong})


@pytest.mark.parametrize("kind", ["PromptProvenanceSpan", "SampledProvenanceSpan"])
def test_a_span_begins_at_0_unless_it_says_otherwise(kind: str) -> None:
    ours, theirs = (getattr(module, kind)(sequence_id="a", length=2) for module in (types, tinker_types))
    assert asdict(ours) == asdict(theirs)


def test_provenance_tiles() -> None:
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})  # type: ignore[dict-item]
    spans: types.ProvenanceSpans = [types.PromptProvenanceSpan("a", 0, 1), types.SampledProvenanceSpan("a", 0, 2)]
    assert datum.with_provenance(spans, spans).model_input_spans == spans
    with pytest.raises(types.WireError, match="cover 1 positions of 3"):
        datum.with_provenance(spans[:1], spans)
