"""Sessions of which nothing is heard end, and nobody else's."""

import asyncio
import math
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest
from sqlalchemy import delete

from api.routes.runs import sessions
from api.server import housekeeping
from api.server.housekeeping import keep_house, reap
from api.state import liveness
from api.state.liveness import end
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.journal import journal, training
from scheduler.journal.accepting import acceptance
from scheduler.order.presence import Present
from store import tables
from tests.api.conftest import MODEL, World
from tests.api.data import batch
from tests.api.made_sessions import FINISHED, NOBODY, age, stored
from tests.api.test_lanes import sample


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
