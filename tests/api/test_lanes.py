"""What is remembered of runs and samplers does not change who may use them."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from store.tables import Operation
from tests.api.conftest import MODEL, World

STEP = {"adam_params": {"learning_rate": 1e-4}, "type": "optim_step"}


def step(world: World, run: str, seq: int, key: str | None = None, status: int = 200) -> Any:
    return world.post("optim_step", {"model_id": run, "seq_id": seq, **STEP}, key=key, status=status)


def sample(world: World, sampler: str, seq: int, key: str | None = None, status: int = 200) -> Any:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
    return world.post("asample", body, key=key, status=status)


@pytest.fixture
def sampler(world: World) -> str:
    body = {"session_id": world.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    return str(world.post("create_sampling_session", body)["sampling_session_id"])


def test_a_run_that_its_owner_just_used_is_not_found_by_others(world: World, sampler: str) -> None:
    run = world.run()
    step(world, run, 1)
    sample(world, sampler, 0)
    for _ in range(2):
        assert step(world, run, 2, world.other_key, 404)["detail"] == (
            f"no model '{run}'; `weft runs` lists the ids of those that this key sees"
        )
        assert "no sampling session" in sample(world, sampler, 1, world.other_key, 404)["detail"]
    step(world, run, 2)
    sample(world, sampler, 1)


def test_a_session_that_has_moved_is_out_of_reach_at_once(world: World) -> None:
    session = world.session()
    run = world.run(session)
    step(world, run, 1)
    world.call("PUT", f"sessions/{session}/project", json={"project_id": "here"}).raise_for_status()
    bound = world.post("weft/keys", {"project_id": "here"})["key"]
    step(world, run, 2, bound)
    world.call("PUT", f"sessions/{session}/project", json={"project_id": "there"}).raise_for_status()
    step(world, run, 3, bound, 404)
    assert step(world, run, 3)["request_id"]


def test_a_repeat_is_known_however_its_number_was_passed_over(world: World, sampler: str) -> None:
    first = sample(world, sampler, 7)["request_id"]
    assert sample(world, sampler, 5)["request_id"] != first
    assert sample(world, sampler, 7)["request_id"] == first
    world.finish(first)
    world.service.journal.answers.clear()
    assert sample(world, sampler, 7)["request_id"] == first
    clone = sample(world, sampler, 10**9 + 7)["request_id"]
    assert clone != first
    assert sample(world, sampler, 10**9 + 7)["request_id"] == clone


def test_a_new_operation_of_a_run_that_is_remembered_reads_nothing(world: World) -> None:
    run, statements = world.run(), []
    step(world, run, 1)

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(world.database._read_engine, "before_cursor_execute", note)
    request_id = step(world, run, 2)["request_id"]
    assert statements == []
    assert world.operation(request_id).seq == 2
    assert any(Operation.__tablename__ in statement for statement in statements)  # a read would have been seen
