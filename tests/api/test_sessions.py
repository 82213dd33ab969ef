"""Sessions: their life, signs of it, their listing and their projects."""

import asyncio
from typing import Any

import pytest

from api.errors import SessionEnded
from api.state.liveness import Liveness
from api.who.principal import Principal
from store.tables import AuditEntry
from tests.api.conftest import MODEL, World
from tests.api.made_sessions import FINISHED, colleague, create, stored


class TestLife:
    def test_heartbeats_until_the_end(self, world: World) -> None:
        session = world.session()
        world.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
        world.post(f"sessions/{session}/finish", FINISHED)
        world.post("session_heartbeat", {"session_id": session}, status=410)
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        assert "ended" in world.post("create_model", body, status=400)["detail"]
        world.post("session_heartbeat", {"session_id": "unknown"}, status=404)
        world.post("session_heartbeat", {"session_id": world.session()}, key=world.other_key, status=404)

    def test_the_first_end_stands(self, world: World) -> None:
        session = world.session()
        for type_, detail in (("interrupted", "ctrl-c"), ("errored", "late")):
            world.post(f"sessions/{session}/finish", {"reason": {"type": type_}, "detail": detail})
        row = stored(world, session)
        assert (row.state, row.finish_reason, row.finish_detail) == ("finished", "interrupted", "ctrl-c")
        assert row.ended_at is not None

    def test_a_retry_of_the_same_call_is_the_same_session(self, world: World) -> None:
        body = {"tags": ["a"], "sdk_version": "0.38.0"}

        def again(idempotency: str, key: str | None = None) -> str:
            headers = {"x-idempotency-key": idempotency}
            return str(world.call("POST", "create_session", key=key, json=body, headers=headers).json()["session_id"])

        first = again("retry-1")
        assert again("retry-1") == first
        assert again("retry-2") != first
        assert again("retry-1", world.other_key) != first

    @pytest.mark.parametrize(
        "changes",
        [
            {"display_name": "x" * 257},
            {"project_id": "\0"},
            {"project_id": " "},
            {"project_id": "p" * 65},
            {"tags": ["a"] * 65},
            {"tags": ["a" * 257]},
            {"user_metadata": [1]},
        ],
    )
    def test_mistakes(self, world: World, changes: dict[str, object]) -> None:
        reply = world.call("POST", "create_session", json={"tags": [], "sdk_version": "1"} | changes)
        assert reply.status_code in (400, 422)
        assert next(iter(changes)) in reply.json()["detail"]


class TestPresence:
    def test_signs_of_life_are_written_now_and_then(self, world: World) -> None:
        session = world.session()
        before = stored(world, session).last_seen_at
        world.post("session_heartbeat", {"session_id": session})
        assert stored(world, session).last_seen_at == before
        world.http.portal.call(world.service.liveness.flush)  # type: ignore[union-attr]
        assert stored(world, session).last_seen_at > before

    def test_an_end_elsewhere_is_noticed_at_the_next_flush(self, world: World) -> None:
        session = world.session()
        signs = Liveness(world.database)
        who = Principal(stored(world, session).org_id, None)

        async def scenario() -> None:
            await signs.beat(who, session)
            world.post(f"sessions/{session}/finish", FINISHED)
            await signs.beat(who, session)
            await signs.flush()
            with pytest.raises(SessionEnded):
                await signs.beat(who, session)

        asyncio.run(scenario())

    def test_silent_sessions_are_forgotten(self, world: World) -> None:
        session = world.session()
        signs = Liveness(world.database)
        who = Principal(stored(world, session).org_id, None)

        async def scenario() -> None:
            await signs.beat(who, session)
            await signs.flush()
            await signs.flush()
            assert signs._seen == {}

        asyncio.run(scenario())


class TestListing:
    def test_details(self, world: World) -> None:
        session = create(world, display_name="mine", user_metadata={"n": 1}, project_id="p")
        run = world.run(session)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = world.post("create_sampling_session", body)["sampling_session_id"]
        assert world.get(f"sessions/{session}") == {
            "training_run_ids": [run],
            "sampler_ids": [sampler],
            "user_metadata": {"n": "1"},
            "display_name": "mine",
            "project_id": "p",
            "tags": [],
        }

    def test_scope(self, world: World) -> None:
        mine, theirs, foreign = create(world), create(world, colleague(world)), create(world, world.other_key)
        assert world.get("sessions")["sessions"] == [mine]
        assert world.get("sessions?access_scope=accessible")["sessions"] == [theirs, mine]
        world.get(f"sessions/{theirs}", status=404)
        world.get(f"sessions/{theirs}?access_scope=accessible")
        world.get(f"sessions/{foreign}?access_scope=accessible", status=404)

    def test_pages(self, world: World) -> None:
        made = [create(world) for _ in range(3)]
        assert world.get("sessions?limit=2")["sessions"] == made[:0:-1]
        assert world.get("sessions?limit=2&offset=2") == {
            "sessions": made[:1],
            "cursor": {"offset": 2, "limit": 2, "total_count": 3},
        }

    @pytest.mark.parametrize("query", ["limit=0", "offset=-1", "access_scope=all"])
    def test_mistakes(self, world: World, query: str) -> None:
        assert query.split("=")[0] in world.get(f"sessions?{query}", status=422)["detail"]


class TestProjects:
    def test_move(self, world: World) -> None:
        session = create(world, project_id="a")
        for project in ("b", "b", "default"):
            assert world.call("PUT", f"sessions/{session}/project", json={"project_id": project}).is_success
        assert world.get(f"sessions/{session}")["project_id"] == "default"
        assert stored(world, session).project_id is None
        with world.database.read() as reading:
            events = [(e.event, e.detail["project_id"]) for e in reading.query(AuditEntry).filter_by(target=session)]
        assert events == [
            ("session_created", "a"),
            ("project_session_assigned", "b"),
            ("project_session_assigned", "default"),
        ]

    @pytest.mark.parametrize("body", [{}, {"project_id": None}, {"project_id": ""}, {"project_id": "x" * 65}])
    def test_mistakes(self, world: World, body: dict[str, Any]) -> None:
        reply = world.call("PUT", f"sessions/{world.session()}/project", json=body)
        assert reply.status_code in (400, 422)
        assert "project_id" in reply.json()["detail"]

    def test_a_foreign_session(self, world: World) -> None:
        path = f"sessions/{create(world)}/project"
        assert world.call("PUT", path, key=world.other_key, json={"project_id": "p"}).status_code == 404
