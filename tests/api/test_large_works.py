"""Whatever is made of millions of numbers is read and written in a turn of `Service.large`."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import pytest
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response

from api.http import bodies
from api.routes.computing import batches, futures, sampling
from api.state import service
from api.state.threads import Threads
from tests.api.conftest import World
from tests.api.data import batch
from tests.api.test_sampling import sample, sampler

T = TypeVar("T")
#: The functions that read or write a body or an answer.
WORKS = {
    bodies: ("check_json", "check_protobuf"),
    batches: ("train_body", "decode_train_request"),
    sampling: ("check_sample",),
    futures: ("sample_result",),
}


class Noting(Threads):
    """Notes whether works run within a turn."""

    inside: ContextVar[bool] = ContextVar("inside", default=False)

    async def run(self, org_id: str | None, work: Callable[[], T]) -> T:
        token = self.inside.set(True)
        try:
            return await super().run(org_id, work)
        finally:
            self.inside.reset(token)


@pytest.fixture
def seen(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The works that were done, and whether each was in such a turn, in a server where everything counts as large."""
    seen = dict[str, bool]()

    def note(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*given: Any, **more: Any) -> Any:
            seen[name] = seen.get(name, True) and Noting.inside.get()
            return real(*given, **more)

        monkeypatch.setattr(module, name, noted)

    object.__setattr__(world.service, "large", Noting(1, 2))
    for module, name in (
        (service, "SMALL_BYTES"),
        (bodies, "INLINE_BYTES"),
        (sampling, "INLINE_BYTES"),
        (batches, "INLINE_PROTOBUF_BYTES"),
    ):
        monkeypatch.setattr(module, name, 8)
    for module, names in WORKS.items():
        for name in names:
            note(module, name)
    return seen


def test_data(world: World, seen: dict[str, bool]) -> None:
    world.train(batch(world.run(), 1))
    assert seen == {"check_json": True, "check_protobuf": True, "decode_train_request": True}


def test_data_in_json(world: World, seen: dict[str, bool]) -> None:
    tensor = {"data": [1, 2], "dtype": "int64"}
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    data = {"data": [datum], "loss_fn": "cross_entropy"}
    world.post("forward", {"forward_input": data, "model_id": world.run(), "seq_id": 1})
    assert seen == dict.fromkeys(("check_json", "train_body", "check_protobuf", "decode_train_request"), True)


def test_samples(world: World, seen: dict[str, bool]) -> None:
    request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
    assert seen == {"check_json": True, "check_sample": True}
    drawn = SequenceResult(np.zeros(2, np.int32), np.zeros(2, np.float32), "length")
    world.finish(request_id, encode_sample_response([drawn]))
    told = world.call(
        "POST", "retrieve_future", json={"request_id": request_id}, headers={"accept": "application/json"}
    )
    assert told.json()["sequences"][0]["tokens"] == [0, 0]
    assert seen == {"check_json": True, "check_sample": True, "sample_result": True}
