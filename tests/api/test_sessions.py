from __future__ import annotations

import asyncio
import math
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest
from sqlalchemy import delete, update
from weft.wire.sessions import ClientSessionFinished, ClientSessionFinishReason, SessionSearchResponse

from api.errors import SessionEnded
from api.routes.runs import sessions
from api.server import housekeeping
from api.server.housekeeping import keep_house, reap
from api.state import liveness
from api.state.liveness import Liveness, end
from api.who import session_search
from api.who.principal import Principal
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.journal import journal, training
from scheduler.journal.accepting import acceptance
from scheduler.order.presence import Present
from store import tables
from store.database.db import Database
from store.tables import AuditEntry
from tests.api.conftest import MODEL, World
from tests.api.data import batch
from tests.api.test_lanes import sample
from tests.keys import create_key

NOBODY = {"reason": None, "detail": None, "key_id": None}
FINISHED = {"reason": {"type": "success"}, "detail": None}


def create(world: World, key: str | None = None, **body: Any) -> str:
    reply = world.post("create_session", {"tags": [], "sdk_version": "0.38.0"} | body, key=key)
    return str(reply["session_id"])


def stored(world: World, session_id: str) -> tables.Session:
    with world.database.read() as session:
        return session.get_one(tables.Session, session_id)


def colleague(world: World) -> str:
    """Another key of the same organisation."""
    return world.database.write_now(lambda session: create_key(session, "acme"))


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


def age(database: Database, session_id: str, hours: float) -> None:
    past = datetime.now(UTC) - timedelta(hours=hours)
    change = update(tables.Session).where(tables.Session.id == session_id).values(last_seen_at=past)
    database.write_now(lambda session: session.execute(change))


class TestReaping:
    def reap(self, world: World, hours: float = 0) -> list[str]:
        at = datetime.now(UTC) + timedelta(hours=hours)
        return list(world.http.portal.call(reap, world.service, at))  # type: ignore[union-attr]

    def test_idle_sessions_end_and_their_runs_are_closed(self, world: World) -> None:
        idle, alive = world.session(), world.session()
        run = world.run(idle)
        with world.database.read() as reading:
            (creation,) = reading.query(tables.Operation.id).filter_by(lane=run).one()
        world.finish(creation)
        path = world.checkpoint(run, 1)
        world.post("session_heartbeat", {"session_id": alive})
        age(world.database, idle, 1.1)
        world.http.portal.call(world.service.liveness.flush)  # type: ignore[union-attr]
        assert self.reap(world) == []  # it worked a moment ago
        age(world.database, alive, -1)
        assert self.reap(world, hours=1.1) == [idle]
        assert stored(world, idle).state == "expired"
        world.post("session_heartbeat", {"session_id": idle}, status=410)
        world.post("session_heartbeat", {"session_id": alive})
        assert "closed" in world.train(batch(run, 2), status=400)["detail"]
        assert world.get("checkpoints")["checkpoints"][0]["tinker_path"] == path

    def test_queued_work_keeps_a_session(self, world: World) -> None:
        session = world.session()
        world.run(session)
        age(world.database, session, 5)
        assert self.reap(world, hours=5) == []

    def test_a_database_whose_clock_leaps_ends_no_session(self, world: World) -> None:
        session, now = world.session(), datetime.now(UTC)
        beat = tables.JobRun(name="heartbeat", succeeded_at=now)
        world.database.write_now(lambda writing: writing.add(beat))
        assert self.reap(world, hours=24 * 3650) == []
        world.database.write_now(lambda writing: writing.execute(delete(tables.JobRun)) and None)
        assert self.reap(world, hours=24 * 3650) == [session]

    def test_what_waits_for_a_number_that_never_came_does_not_keep_it(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        with world.database.read() as reading:
            (creation,) = reading.query(tables.Operation.id).filter_by(lane=run).one()
        world.finish(creation)
        parked = world.train(batch(run, 2))["request_id"]
        age(world.database, session, 5)
        assert self.reap(world, hours=5) == [session]
        world.http.portal.call(world.journal.flush)  # type: ignore[union-attr,call-arg]
        assert "session ended before operation 1" in world.error(parked)

    @pytest.mark.parametrize(
        ("at_s", "state"),
        [
            ([100, 200, 300], "active"),  # it has been silent for less than the 600 s
            ([100, 200, 300, 400, 500, 599], "active"),
            ([100, 200, 300, 400, 500, 601], "expired"),
            ([601], "active"),  # nobody could be heard: the machine slept, or its clock was set
            ([100, 200, 5000, 5100], "active"),
            ([100, 200, 5000, 5100, 5200], "expired"),
            ([100, 200, -5000, 700, 800], "active"),
            ([100, 200, -5000, 700, 821], "expired"),
        ],
    )
    def test_nobody_is_silent_while_nobody_could_be_heard(
        self, world: World, monkeypatch: pytest.MonkeyPatch, at_s: list[float], state: str
    ) -> None:
        monkeypatch.setattr(housekeeping, "ROUND_S", 0.0)
        session, began = world.session(), datetime.now(UTC)
        rounds = iter([0.0, *at_s])

        def clock() -> datetime:
            if (after_s := next(rounds, None)) is None:
                raise asyncio.CancelledError
            return began + timedelta(seconds=after_s)

        with pytest.raises(CancelledError):
            world.http.portal.call(keep_house, world.service, clock)  # type: ignore[union-attr]
        assert stored(world, session).state == state

    def test_a_server_whose_clock_is_ahead_ends_no_session_that_others_hear_of(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(housekeeping, "ROUND_S", 0.0)
        session, rounds = world.session(), iter(range(0, 400, 100))

        class Ahead(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                if (after_s := next(rounds, None)) is None:
                    raise asyncio.CancelledError
                return datetime.now(tz) + timedelta(hours=1, seconds=after_s)

        monkeypatch.setattr(housekeeping, "datetime", Ahead)
        with pytest.raises(CancelledError):
            world.http.portal.call(keep_house, world.service)  # type: ignore[union-attr]
        assert stored(world, session).state == "active"

    def test_signs_of_life_are_of_the_databases_time(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise sessions heard by a server whose clock is behind would be ended by the others."""

        class Behind(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) - timedelta(hours=1)

        for module in (sessions, liveness):
            monkeypatch.setattr(module, "datetime", Behind)
        began, session = datetime.now(UTC), world.session()
        assert stored(world, session).last_seen_at >= began
        age(world.database, session, 2)
        world.post("session_heartbeat", {"session_id": session})
        world.http.portal.call(world.service.liveness.flush)  # type: ignore[union-attr]
        assert stored(world, session).last_seen_at >= began

    def test_requests_count_by_the_databases_time_too(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """As for a sampler in a process that sends no signs of life, on a server whose clock is behind."""

        class Behind(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) - timedelta(hours=2)

        monkeypatch.setattr(acceptance, "datetime", Behind)
        session = world.session()
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        body = {
            "sampling_session_id": world.post("create_sampling_session", sampler)["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 2},
            "num_samples": 1,
        }
        age(world.database, session, 2)
        world.finish(world.post("asample", body)["request_id"], b"x", prefill=2, sample=1)
        world.http.portal.call(world.service.liveness.flush)  # type: ignore[union-attr]
        assert self.reap(world) == []

    def test_a_run_that_was_being_made_when_its_session_ended_is_over(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session, accept = world.session(), world.journal.accept

        async def late(*arguments: Any) -> str:
            await world.database.write(lambda db: end(db, db.get_one(tables.Session, session), "finished", **NOBODY))
            return await accept(*arguments)

        monkeypatch.setattr(world.journal, "accept", late)
        run = world.run(session)
        with world.database.read() as reading:
            (creation,) = reading.query(tables.Operation.id).filter_by(lane=run).one()
        assert self.reap(world) == []
        assert "closed" in world.train(batch(run, 1), status=400)["detail"]
        world.finish(creation)
        assert world.outcome(creation).status_code == 200
        world.http.portal.call(world.journal.flush)  # type: ignore[union-attr,call-arg]
        with world.database.read() as reading:
            assert reading.get_one(tables.Run, run).state == "closed"
        assert run not in world.journal.training.runs

    def test_work_that_nobody_takes_is_given_up_a_day_after_its_client_was_heard_of(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If other models are served after a restart, what waits for this one would hold its user's money for ever."""
        SampleDesk(world.journal)
        monkeypatch.setattr(SampleDesk, "presence", lambda *_: Present(missing_s=math.inf))
        session = world.session()
        made = world.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL})
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = world.post("create_sampling_session", body)["sampling_session_id"]
        asked = sample(world, sampler, 1)["request_id"]
        held = world.get("weft/usage")["held_nusd"]
        assert held > 0
        age(world.database, session, 25)
        assert self.reap(world) == []
        for where in (journal, training, housekeeping):
            monkeypatch.setattr(where, "WORK_WAITS", timedelta())
        assert self.reap(world) == [session]
        world.http.portal.call(world.journal.flush)  # type: ignore[union-attr,call-arg]
        given_up = world.outcome(made["request_id"]).json()
        assert given_up["category"] == "server"
        assert "hours, and its session has ended" in given_up["error"]
        assert world.outcome(asked).status_code == 200
        assert world.get("weft/usage")["held_nusd"] == 0
        with world.database.read() as reading:
            assert [run.state for run in reading.query(tables.Run)] == ["closed"]

    def test_an_expired_session_stays_expired(self, world: World) -> None:
        session = world.session()
        age(world.database, session, 2)
        assert self.reap(world) == [session]
        world.post(f"sessions/{session}/finish", FINISHED)
        assert (stored(world, session).state, stored(world, session).finish_reason) == ("expired", None)
        assert self.reap(world) == []


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


class TestSearch:
    def found(self, world: World, key: str | None = None, **wanted: Any) -> list[str]:
        return [s["session_id"] for s in world.post("sessions/search", wanted, key=key)["sessions"]]

    def test_a_summary(self, world: World) -> None:
        session = create(world, display_name="Night run", user_metadata={"seed": 7})
        world.checkpoint(world.run(session), 1)
        (summary,) = world.post("sessions/search", {})["sessions"]
        created = summary.pop("created_at")
        assert datetime.fromisoformat(created) == stored(world, session).created_at
        assert summary == {
            "session_id": session,
            "owner": "weft:key:1",
            "project_id": "default",
            "status": {"type": "active"},
            "checkpoints_count": 1,
            "checkpoint_storage_bytes": 7,
            "display_name": "Night run",
            "user_metadata": {"seed": "7"},
        }

    def test_pages_newest_first(self, world: World) -> None:
        made = [create(world, display_name="x" if number % 2 else "y") for number in range(6)]
        pages, cursor = [], None
        for _ in range(3):
            page = world.post("sessions/search", {"limit": 2, **({"cursor": cursor} if cursor else {})})
            pages += [s["session_id"] for s in page["sessions"]]
            cursor = page["next_cursor"]
        assert (pages, cursor) == (made[::-1], None)
        odd = world.post("sessions/search", {"limit": 2, "display_name": "X"})
        assert [s["session_id"] for s in odd["sessions"]] == [made[5], made[3]]
        rest = world.post("sessions/search", {"limit": 2, "display_name": "X", "cursor": odd["next_cursor"]})
        assert ([s["session_id"] for s in rest["sessions"]], rest["next_cursor"]) == ([made[1]], None)

    def test_conditions(self, world: World) -> None:
        night = create(world, display_name="Große Night", user_metadata={"a": "1", "b": '"2.$'}, project_id="p")
        day = create(world, display_name="grosse day")
        assert self.found(world, display_name="night GROSSE") == [night]
        assert self.found(world, display_name="grosse") == [day, night]
        assert self.found(world, session_id=day) == [day]
        assert self.found(world, session_id=day, display_name="night") == [day, night]
        assert self.found(world, user_metadata={"a": "1", "b": '"2.$'}) == [night]
        assert self.found(world, user_metadata={"a": "2"}) == []
        assert self.found(world, project_ids=["p"]) == [night]
        assert self.found(world, project_ids=["p", "default"]) == [day, night]
        assert self.found(world, project_ids=[]) == []

    @pytest.mark.parametrize("wanted", [{"display_name": "night"}, {"user_metadata": {"a": "1"}}])
    def test_a_page_ends_when_enough_is_looked_at(
        self, world: World, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
    ) -> None:
        """However many sessions there are and even if none fits; all pages together have all that do."""
        monkeypatch.setattr(session_search, "MOST_LOOKED_AT", 3)
        fitting = {"display_name": "night", "user_metadata": {"a": "1"}}
        made = [create(world, **(fitting if number in (0, 1, 6) else {})) for number in range(8)]
        pages, cursor = [], None
        for _ in range(8):
            page = world.post("sessions/search", {**wanted, **({"cursor": cursor} if cursor else {})})
            pages.append([s["session_id"] for s in page["sessions"]])
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert pages == [[made[6]], [], [made[1], made[0]]]

    @pytest.mark.parametrize(
        "wanted",
        [{"display_name": "a " * 129}, {"statuses": [{"type": "active"}] * 1050}],
        ids=["name", "statuses"],
    )
    def test_what_is_looked_for_has_an_end(self, world: World, wanted: dict[str, Any]) -> None:
        """A name was searched for each of thousands of words, and SQLite takes no thousand alternatives."""
        reply = world.call("POST", "sessions/search", json=wanted)
        assert reply.status_code == 400
        assert next(iter(wanted)) in reply.json()["detail"]

    def test_statuses(self, world: World) -> None:
        done, failed, silent, active = (create(world) for _ in range(4))
        world.post(f"sessions/{done}/finish", FINISHED)
        world.post(f"sessions/{failed}/finish", {"reason": {"type": "errored"}, "detail": "boom"})
        age(world.database, silent, 2)
        world.http.portal.call(reap, world.service, datetime.now(UTC))  # type: ignore[union-attr]
        assert self.found(world, statuses=[{"type": "active"}]) == [active]
        assert self.found(world, statuses=[{"type": "client_finished"}]) == [failed, done]
        finished = {"type": "client_finished", "reasons": ["errored"]}
        assert self.found(world, statuses=[finished, {"type": "active"}]) == [active, failed]
        assert self.found(world, statuses=[{"type": "cancelled"}, {"type": "failed"}]) == []
        statuses = {s["session_id"]: s["status"] for s in world.post("sessions/search", {})["sessions"]}
        assert statuses[silent] is None
        assert statuses[failed] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "boom"}

    def test_of_what_the_operator_imported(self, world: World) -> None:
        session = create(world)
        imported = update(tables.Session).values(state="finished", finish_reason="imported")
        world.database.write_now(lambda database: database.execute(imported))
        (found,) = SessionSearchResponse.model_validate(world.post("sessions/search", {})).sessions
        assert found.session_id == session
        assert found.status == ClientSessionFinished(reason=ClientSessionFinishReason(type="imported"))

    def test_owners(self, world: World) -> None:
        other = colleague(world)
        mine, theirs, foreign = create(world), create(world, other), create(world, world.other_key)
        assert self.found(world) == [mine]
        assert self.found(world, owner={"type": "accessible"}) == [theirs, mine]
        owner = world.post("sessions/search", {}, key=other)["sessions"][0]["owner"]
        assert self.found(world, owner={"type": "user", "owner_urns": [owner]}) == [theirs]
        rival = world.post("sessions/search", {}, key=world.other_key)["sessions"][0]["owner"]
        assert self.found(world, owner={"type": "user", "owner_urns": [rival]}) == []
        assert foreign not in self.found(world, session_id=foreign, owner={"type": "accessible"})

    @pytest.mark.parametrize(
        "body",
        [
            {"limit": 0},
            {"limit": 201},
            {"statuses": []},
            {"display_name": ""},
            {"owner": {"type": "everybody"}},
            {"owner": {"type": "user", "owner_urns": ["someone"]}},
            {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}},
            {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "\0"}},
            {"cursor": {"last_created_at": "0001-01-01T00:00:00+02:00", "last_session_id": "x"}},
            {"colour": "red"},
        ],
    )
    def test_mistakes(self, world: World, body: dict[str, Any]) -> None:
        reply = world.call("POST", "sessions/search", json=body)
        assert reply.status_code in (400, 422)
        assert next(iter(body)) in reply.json()["detail"]

    @pytest.mark.parametrize("text", ["\0", "x" * 1000, "é", "'; --"])
    def test_strange_texts_find_nothing(self, world: World, text: str) -> None:
        create(world)
        assert self.found(world, session_id=text) == []
        assert self.found(world, project_ids=[text]) == []
        assert self.found(world, user_metadata={text: text}) == []
