"""Wrong arguments are named as they were written, at once; `x_async` takes what `x` takes; reprs say what it is."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import weft
from weft import types
from weft.errors import WeftError

from examples.sft_docs import read_jsonl
from tests.client_sdk.stub_server import SESSION, Stub, status

CLIENTS = (weft.ServiceClient, weft.TrainingClient, weft.SamplingClient, weft.RestClient, weft.AdminClient)
#: Methods that send nothing, or return at once and leave nothing to wait for.
WITHOUT_TWIN = {"log", "create_rest_client", "from_sampler_handle", "future", "result"}
DATUM = types.Datum([1, 2], {"target_tokens": [2, 3], "weights": [1, 1]})
ADAM = types.AdamParams()
MIXED: list[Any] = [DATUM, {"model_input": [1]}]
UNEVEN: list[Any] = [1, 2.5]
TEXTS: list[Any] = ["1"]


def methods() -> list[tuple[type, str]]:
    found = [(client, name) for client in CLIENTS for name, _ in inspect.getmembers(client, callable)]
    return [(client, name) for client, name in found if not name.startswith("_") and not name.endswith("_async")]


@pytest.mark.parametrize(("client", "name"), methods())
def test_every_method_has_a_twin_of_its_arguments(client: type, name: str) -> None:
    if name not in WITHOUT_TWIN:
        mine, twin = (inspect.signature(getattr(client, each)) for each in (name, f"{name}_async"))
        assert list(twin.parameters.values()) == list(mine.parameters.values())
        assert inspect.iscoroutinefunction(getattr(client, f"{name}_async"))


@pytest.mark.parametrize("key", ["ключ", "tml-ab\n", "tml-\u201cab"])
def test_a_key_that_no_header_can_hold_is_refused_by_name(key: str) -> None:
    with pytest.raises(WeftError, match="WEFT_API_KEY or api_key as it was printed"):
        weft.ServiceClient(base_url="http://127.0.0.1:9", api_key=key)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no conversation"),
        ('{"messages": []}\n\n{"messages": [}', "line 3: not of"),
        ("[1]", "line 1"),
    ],
)
def test_the_example_of_supervised_training_names_the_line_it_cannot_read(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_jsonl(file)


def nll(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


Wrong = Callable[[weft.TrainingClient, weft.SamplingClient], object]
WRONG: list[tuple[Wrong, str]] = [
    (lambda run, _: run.forward_backward(DATUM, "cross_entropy"), "data is a Datum; give a list of Datum"),
    (lambda run, _: run.forward_backward(None, "cross_entropy"), "data is a NoneType; give a list of Datum"),  # type: ignore[arg-type]
    (lambda run, _: run.forward_backward([], "cross_entropy"), "data is empty"),
    (lambda run, _: run.forward_backward(MIXED, "ppo"), r"data\[1\] is a dict; give a Datum"),
    (
        lambda run, _: run.forward_backward([DATUM], "ppo", {"clip_high_threshold": None}).result(10),  # type: ignore[dict-item]
        r"^loss_fn_config\['clip_high_threshold'\] must be a number or a text, got None",
    ),
    (lambda run, _: run.forward_backward_custom([DATUM], "ppo"), "loss_fn must be a function .* got 'ppo'"),
    (lambda run, _: run.forward([DATUM], len), "loss_fn is a builtin_function_or_method; .* forward_backward_custom"),
    (lambda run, _: run.optim_step(1e-4), "optim_params must be AdamParams or DimuonParams.*got 0.0001"),
    (lambda run, _: run.optim_step(), "optim_params must be AdamParams"),
    (lambda run, _: run.optim_step(adam_params={"learning_rate": 1}), "adam_params must be AdamParams"),
    (lambda run, _: run.save_state("../x"), r"^name: .*got '\.\./x'"),
    (lambda run, _: run.save_state("x", ttl_seconds=1), "^ttl_seconds: .*got 1$"),
    (lambda run, _: run.save_weights_for_sampler("a b"), "^name: must be of A-Z, .*, got 'a b'"),
    (lambda run, _: run.load_state(7), "^path: .*got 7"),
    (lambda _, sampler: sampler.sample("hello", 1, types.SamplingParams()), "^prompt is text; give token ids"),
    (lambda _, sampler: sampler.sample(UNEVEN, 1, types.SamplingParams()), r"^prompt\[1\] is 2\.5; token ids"),
    (lambda _, sampler: sampler.sample([1], 0, types.SamplingParams()), "^num_samples: .*got 0"),
    (lambda _, sampler: sampler.sample([1], 1, 64), "^sampling_params: .*got 64"),
    (lambda _, sampler: sampler.sample([1], 1, types.SamplingParams(), "yeah"), "^include_prompt_logprobs: .*'yeah'"),
    (lambda _, sampler: sampler.compute_logprobs("hello"), "^prompt is text"),
    (lambda _, sampler: sampler.compute_logprobs({3, 1}), "^prompt is a set; give token ids in a list"),
    (lambda _, sampler: sampler.compute_logprobs([1, True]), r"^prompt\[1\] is True; token ids"),
    (lambda _, sampler: sampler.compute_logprobs(TEXTS), r"^prompt\[0\] is '1'; token ids"),
    (lambda _, sampler: sampler.compute_logprobs(np.array([1.0, 2.0])), r"^prompt\[0\] is 1\.0; token ids"),
    (
        lambda *_: types.Datum([1, 2], {"target_tokens": [1.5, 2.5]}),
        "'target_tokens': tensor holds values that are no 64-bit",
    ),
    (
        lambda *_: types.Datum([1, 2], {"target_tokens": [1, 2**63]}),
        "'target_tokens': tensor holds values that are no 64-bit",
    ),
    (
        lambda *_: types.Datum([1, 2], {"target_tokens": [1, math.inf]}),
        "'target_tokens': tensor holds values that are no 64-bit",
    ),
    (
        lambda *_: types.Datum([1, 2], {"weights": np.ones(2, complex)}),
        "^loss input 'weights': .*dtype complex128 cannot be sent",
    ),
    (lambda run, _: run.log({"a": "x"}), "metric 'a' must be a number, got 'x'"),  # type: ignore[dict-item]
    (lambda run, _: run.create_custom_loss(nll, {}), "input_ranks must be a dict of logprobs, weights; got {}"),
    (lambda run, _: run.create_custom_loss(nll, None), "input_ranks must be .*; got None"),  # type: ignore[arg-type]
    (
        lambda run, _: run.create_custom_loss(nll, {"logprobs": 1, "weights": 5}),  # type: ignore[dict-item]
        "^input_ranks: input should be 0, 1 or 2, got 5",
    ),
    (lambda _, sampler: sampler.compute_logprobs([1], "two"), "^prompt_logprobs_last_n: .*'two'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_mistakes_name_what_was_written(service: weft.ServiceClient, stub: Stub, wrong: Wrong, message: str) -> None:
    run = service.create_lora_training_client("org/tiny").result(10)
    sampler = service.create_sampling_client(base_model="org/tiny").result(10)
    before = len(stub.asked)
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(run, sampler)
    assert len(stub.asked) == before


def test_what_makes_a_run_is_named(service: weft.ServiceClient) -> None:
    with pytest.raises(ValueError, match=r"^rank: .*got 0"):
        service.create_lora_training_client("org/tiny", rank=0)
    with pytest.raises(ValueError, match=r"^arguments: at least one of train_unembed"):
        service.create_lora_training_client("org/tiny", train_mlp=False, train_attn=False, train_unembed=False)
    with pytest.raises(ValueError, match=r"^base_model: .*got None$"):
        service.create_lora_training_client(cast(Any, None)).result(10)
    with pytest.raises(ValueError, match=r"^model_path: .*got 3$"):
        service.create_sampling_client(cast(Any, 3)).result(10)
    with pytest.raises(ValueError, match=r"^project_id: .*got 3$"):
        weft.ServiceClient(project_id=cast(Any, 3), base_url="http://server", api_key="tml-x")


def test_a_future_that_is_taken_for_its_result_says_so(service: weft.ServiceClient) -> None:
    future: Any = service.create_lora_training_client("org/tiny").optim_step(ADAM)
    with pytest.raises(AttributeError, match=r"'APIFuture' .*no attribute 'metrics'.*\.result\(\) or await gives"):
        _ = future.metrics


def test_token_ids_are_a_prompt(service: weft.ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny")
    sampler.sample([7, 8, 9], 1, types.SamplingParams(max_tokens=3)).result(10)
    asyncio.run(sampler.sample_async(types.ModelInput.from_ints([7, 8, 9]), 1, types.SamplingParams(max_tokens=3)))
    first, second = stub.bodies("/asample")
    assert first["prompt"] == second["prompt"] == {"chunks": [{"tokens": [7, 8, 9], "type": "encoded_text"}]}


def test_reprs(service: weft.ServiceClient, stub: Stub) -> None:
    run = service.create_lora_training_client("org/tiny", rank=8).result(10)
    assert repr(run) == f"TrainingClient('{SESSION}:train:0' on 'org/tiny' at rank 8)"
    sampler = service.create_sampling_client(base_model="org/tiny").result(10)
    assert repr(sampler) == f"SamplingClient('{SESSION}:sample:0' of 'org/tiny')"
    assert repr(service) == f"ServiceClient('{stub.base_url}')"
    assert repr(service.create_rest_client()) == f"RestClient('{stub.base_url}')"
    assert "tml-test" not in repr([service, run, sampler])
    step = run.optim_step(ADAM)
    step.result(10)
    assert repr(step) == "APIFuture(done: OptimStepResponse)"
    stub.faults["/optim_step"] = [status(400, "no such thing")]
    failed = run.optim_step(ADAM)
    with pytest.raises(weft.BadRequestError):
        failed.result(10)
    assert repr(failed).startswith("APIFuture(failed: BadRequestError: no such thing")
    stub.faults["/create_model"] = [status(404, "no such model")]
    lost = service.create_lora_training_client("org/none")
    with pytest.raises(weft.NotFoundError):
        lost.result(10)
    assert repr(lost).startswith("TrainingClient(failed: NotFoundError: no such model")
