"""Every integer in a request has bounds: one beyond them is refused when it is read, and reaches neither the database
nor an array."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import weft.wire
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from weft import Plan, PlannedSample
from weft.plan.validate import validate
from weft.wire.account.limits import LimitsResponse
from weft.wire.base import SEEDS, Response

import api
from api.server.app import front
from tests.api.conftest import MODEL, World

#: Sent as the largest that is allowed, or as the first that is too large.
MOST = 2**63
#: Elements of arrays, which numpy reads.
ARRAYS = {"SampleRequest.target_prompt_logprobs.data"}


def models() -> Iterator[type[BaseModel]]:
    """Every model of the wire and of the API, except those of answers."""
    for package in (weft.wire, api):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    waiting = BaseModel.__subclasses__()
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        if model.__module__.startswith(("weft.wire", "api.")) and not issubclass(model, Response):
            yield model


def unbounded(schema: Any, path: str) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from unbounded(item, path)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer" and not ("enum" in schema or "const" in schema):
            most = min(schema.get("maximum", MOST + 1), schema.get("exclusiveMaximum", MOST + 1))
            if most > MOST:
                yield path
        for name, item in schema.items():
            if name == "properties":
                for field, inner in item.items():
                    yield from unbounded(inner, f"{path}.{field}")
            elif name != "$defs":
                yield from unbounded(item, path)


def test_integers_of_bodies_are_bounded() -> None:
    found = {model.__name__: model for model in models()}
    assert {"FuturesRetrieveRequest", "SampleRequest", "Address", "TopUp"} <= found.keys()
    names = [name for model in found.values() for name in unbounded(model.model_json_schema(), model.__name__)]
    assert set(names) <= ARRAYS


def test_integers_of_addresses_are_bounded() -> None:
    looked_at = 0
    route: Any
    for route in front().routes:
        own = route.dependant
        for parameter in (*own.query_params, *own.path_params, *own.header_params):
            info: FieldInfo = parameter.field_info
            if info.annotation in (int, int | None):
                looked_at += 1
                bounds = [
                    most for item in info.metadata for most in (getattr(item, "le", None), getattr(item, "lt", None))
                ]
                assert any(most is not None and most <= MOST for most in bounds), (route.path, parameter.name)
    assert looked_at > 5


def test_every_seed_has_the_same_limits_in_the_same_words(world: World) -> None:
    """For a run, for a sample by either API, and for a plan that is looked at before it is sent."""
    limits = LimitsResponse.model_validate(world.get("weft/limits"))
    for seed, good in ((-(2**63), True), (2**63 - 1, True), (2**63, False), (-(2**63) - 1, False)):
        says = "" if good else f"seed: {SEEDS} (got {seed})"
        lora = {"rank": 4, "seed": seed}
        run = {"session_id": world.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        told = [world.post("create_model", run, status=200 if good else 422).get("detail", "")]
        params = {"prompt": {"chunks": []}, "num_samples": 1, "sampling_params": {"seed": seed}, "seq_id": 0}
        told.append(world.post("asample", params | {"sampling_session_id": "x"}, status=404 if good else 422)["detail"])
        body = {"model": "x", "prompt": [1], "seed": seed}
        answer = world.http.post("/v1/completions", headers={"x-api-key": world.key}, json=body)
        told.append(answer.json()["error"]["message"])
        plan = Plan(MODEL, [PlannedSample([[1]], 1, {"max_tokens": 1})], rank=4, seed=seed)
        told += [str(problem) for problem in validate(plan, limits) if problem.where == "seed"]
        assert all(says in each for each in told), told
        assert good or len(told) == 4


@pytest.mark.parametrize("field", ["cloned_sampler_id", "prev_cursor"])
@pytest.mark.parametrize("value", [2**62, 2**63 - 1, 2**63, 2**64, 2**1000, -1])
def test_a_poll_that_no_database_could_answer(world: World, field: str, value: int) -> None:
    body: dict[str, Any] = {"target": {"sampling_session_id": "s"}, "prev_cursor": 0, "timeout": 0}
    (body if field == "prev_cursor" else body["target"])[field] = value
    detail = world.post("retrieve_futures", body, status=422)["detail"]
    assert field in detail
