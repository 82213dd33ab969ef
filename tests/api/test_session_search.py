"""Sessions are found by what was said of them."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import update
from weft.wire.sessions import ClientSessionFinished, ClientSessionFinishReason, SessionSearchResponse

from api.server.housekeeping import reap
from api.who import session_search
from store import tables
from tests.api.conftest import World
from tests.api.made_sessions import FINISHED, age, colleague, create, stored


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
