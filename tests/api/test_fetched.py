"""Which results clients have received is written down, so that those need not be kept for long; on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest

from api.state import fetched
from api.state.fetched import Fetched
from api.who.principal import Principal
from scheduler.journal.ending.outcomes import result_ref
from scheduler.journal.ending.results import FETCHED_LAST, Results
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import Settings
from tests.api.conftest import MODEL, World, open_world
from tests.api.data import batch
from tests.api.test_completions import poll, submit
from tests.api.test_sampling import sample, sampler
from tests.tenancy.conftest import member
from workers.model.card import ModelCard

NOW = datetime.now(UTC)


@pytest.fixture
def world(settings: Settings, card: ModelCard, any_database: Database, blobs: FolderBlobs) -> Iterator[World]:
    limits = settings.limits.model_copy(update={"inline_result_bytes": 100})
    with open_world(settings.model_copy(update={"limits": limits}), card, any_database, blobs) as world:
        yield world


def finished(world: World, payload: bytes = b"x", number: int = 0) -> str:
    request_id = str(world.train(batch(world.run(number=number), 1))["request_id"])
    world.finish(request_id, payload, tokens=1)
    return request_id


def retrieve(world: World, request_id: str, **options: Any) -> Any:
    return world.call("POST", "retrieve_future", json={"request_id": request_id, **options})


def flush(world: World) -> int:
    return int(world.http.portal.call(world.service.fetched.flush))  # type: ignore[union-attr]


def sweep(world: World, later: timedelta) -> int:
    return Results(world.database, world.service.blobs, 10**9, lambda: datetime.now(UTC) + later).sweep()


def test_a_server_whose_clock_is_behind_keeps_what_it_has_given_for_as_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping goes by the database's clock; a client whose answer was lost on the way asks again."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(fetched, "datetime", Behind, raising=False)
    mine = finished(world)
    assert retrieve(world, mine).content == b"x"
    assert flush(world) == 1
    world.service.journal.answers.clear()
    assert sweep(world, timedelta()) == 0
    assert retrieve(world, mine).content == b"x"


def test_settling_writes_how_large_a_result_is(world: World) -> None:
    assert world.operation(finished(world, b"x" * 17)).result_bytes == 17
    waiting = str(world.train(batch(world.run(number=1), 1))["request_id"])
    assert world.operation(waiting).result_bytes is None


def test_a_result_that_its_client_was_given_is_kept_for_a_while_and_then_gone(world: World) -> None:
    mine, waits = finished(world), finished(world, number=1)
    assert retrieve(world, mine).content == b"x"
    assert world.operation(mine).fetched_at is None  # no request writes this
    assert flush(world) == 1
    assert world.operation(mine).fetched_at is not None
    world.service.journal.answers.clear()
    assert sweep(world, FETCHED_LAST - timedelta(minutes=1)) == 0
    assert retrieve(world, mine).content == b"x"
    assert sweep(world, FETCHED_LAST + timedelta(minutes=1)) == 1
    assert retrieve(world, mine).status_code == 410
    assert retrieve(world, waits).content == b"x"


def test_an_announcement_is_not_a_result(world: World) -> None:
    request_id = finished(world, b"x" * 101)
    assert retrieve(world, request_id, allow_metadata_only=True).json()["status"] == "complete_metadata"
    assert flush(world) == 0
    assert len(retrieve(world, request_id, allow_metadata_only=False).content) == 101
    assert flush(world) == 1


def test_a_colleague_who_looks_takes_nothing_away(world: World) -> None:
    """Members change only their own: a colleague's reading does not tell whether the owner has the result."""
    ann, bob = (member(world, "member", f"{name}@example.com")[1] for name in ("ann", "bob"))
    session = world.post("create_session", {"tags": [], "sdk_version": "1"}, key=ann)["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler_id = world.post("create_sampling_session", body, key=ann)["sampling_session_id"]
    request_id = world.post("asample", sample(sampler_id, 0), key=ann)["request_id"]
    world.finish(request_id, b"1" * 2000, sample=1)
    asked = {"target": {"type": "sampling_session", "sampling_session_id": sampler_id}, "timeout": 0}
    for key, had in ((bob, False), (ann, True)):
        assert world.call("POST", "retrieve_future", key=key, json={"request_id": request_id}).status_code == 200
        world.post("retrieve_futures", {**asked, "prev_cursor": 0, "retrieved_request_ids": [request_id]}, key=key)
        assert flush(world) == had
        assert (world.operation(request_id).fetched_at is not None) == had
        assert world.service.blobs.exists(result_ref(request_id)) != had


def test_the_first_time_counts(world: World) -> None:
    request_id = finished(world)
    retrieve(world, request_id)
    flush(world)
    first = world.operation(request_id).fetched_at
    retrieve(world, request_id)
    assert flush(world) == 0
    assert world.operation(request_id).fetched_at == first


def test_nothing_is_noted_while_there_is_no_result(world: World) -> None:
    request_id = str(world.train(batch(world.run(), 1))["request_id"])
    assert retrieve(world, request_id).status_code == 408
    assert retrieve(world, "unknown").status_code == 404
    assert flush(world) == 0
    assert world.operation(request_id).fetched_at is None


def test_an_organisation_cannot_say_that_of_anothers_results(world: World) -> None:
    mine = finished(world)
    body = {"session_id": world.session(world.other_key), "sampling_session_seq_id": 0, "base_model": MODEL}
    theirs = world.post("create_sampling_session", body, key=world.other_key)["sampling_session_id"]
    target = {"type": "sampling_session", "sampling_session_id": theirs}
    world.post(
        "retrieve_futures", {"target": target, "timeout": 0, "retrieved_request_ids": [mine]}, key=world.other_key
    )
    assert flush(world) == 0
    assert world.operation(mine).fetched_at is None


def test_what_a_client_has_acknowledged_is_written_down_by_any_replica(world: World) -> None:
    """The replica that is told may not have the result in memory."""
    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    world.finish(request_id, b"x" * 2000, prefill=3, sample=4)
    world.service.journal.answers.clear()
    poll(world, sampler_id, retrieved_request_ids=["unknown", "\0", request_id])
    assert flush(world) == 1
    assert world.service.blobs.exists(result_ref(request_id))
    assert sweep(world, FETCHED_LAST + timedelta(minutes=1)) == 1
    assert not world.service.blobs.exists(result_ref(request_id))


def test_many_are_written_in_parts_and_more_than_many_are_not_noted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "FLUSH_ROWS", 2)
    monkeypatch.setattr(fetched, "MAX_NOTED", 5)
    run = world.run()
    ids = [str(world.train(batch(run, 1 + number))["request_id"]) for number in range(7)]
    for request_id in ids:
        world.finish(request_id, b"x", tokens=1)
    org_id = world.operation(ids[0]).org_id
    noted = Fetched(world.database)
    noted.note(Principal(org_id, None), ids[:4])
    noted.note(Principal(org_id, None), ids)
    assert world.http.portal.call(noted.flush) == 5  # type: ignore[union-attr]
    assert sum(world.operation(request_id).fetched_at is not None for request_id in ids) == 5
    noted.note(Principal(org_id, None), ids[3:])
    assert world.http.portal.call(noted.flush) == 2  # type: ignore[union-attr]
