from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from api.http import traces
from store import tables
from store.database.db import Database
from tests.api.conftest import MODEL, World
from tests.api.data import batch

START = datetime(2026, 11, 21, 12, tzinfo=UTC)
START_NS = int(START.timestamp()) * 10**9


def operation(
    seq: int, at_us: int, timings: dict[str, Any] | None, lane: str = "s:train:0", **facts: Any
) -> tables.Operation:
    at = START + timedelta(microseconds=at_us)
    row = {
        "id": f"{lane}-{seq}", "org_id": "o", "session_id": "s", "lane": lane, "seq": seq, "kind": "forward_backward",
        "base_model": "m", "state": "done", "tokens": 10, "body_ref": "", "body_sha256": "", "plan": {},
        "accepted_at": at, "finished_at": at, "timings": timings,
    }  # fmt: skip
    return tables.Operation(**(row | facts))


def store(database: Database, *rows: tables.Operation) -> None:
    def write(session: Any) -> None:
        session.add(tables.Organisation(id="o", name="o", created_at=START))
        session.flush()
        session.add_all(rows)

    database.write_now(write)


class Slice:
    def __init__(self, name: str, begin: int, end: int, depth: int, facts: dict[str, Any]) -> None:
        self.name, self.begin, self.end, self.depth, self.facts = name, begin, end, depth, facts

    def __repr__(self) -> str:
        return f"{'  ' * self.depth}{self.name} {self.begin}..{self.end}"


def slices(content: bytes) -> dict[str, list[Slice]]:
    """Every track's slices, nested as its reader does: by time, and in the file's order. Times in microseconds."""
    trace = Trace.FromString(content)
    names = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    found: dict[str, list[Slice]] = {}
    open_: dict[int, list[Slice]] = {}
    for packet in sorted((p for p in trace.packet if p.HasField("track_event")), key=lambda p: p.timestamp):
        event, at = packet.track_event, (packet.timestamp - START_NS) // 1000
        stack = open_.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            facts = {a.name: a.string_value or a.int_value for a in event.debug_annotations}
            stack.append(Slice(event.name, at, at, len(stack), facts))
            lane = names[names[event.track_uuid].parent_uuid].name
            found.setdefault(f"{lane} {event.track_uuid}", []).append(stack[-1])
        else:
            stack.pop().end = at
    assert not any(open_.values())
    return found


def drawn(database: Database) -> dict[str, list[Slice]]:
    return slices(b"".join(traces.trace(database, "s", START + timedelta(seconds=1))))


def test_stages_of_an_operation(database: Database) -> None:
    timings = {"stretches": [[4, 10, 20, 3, 2, 100], [6, 30, 45, 1, 1, 10]], "computed": 45, "settled": 50}
    store(database, operation(1, 5, timings))
    ((track, found),) = drawn(database).items()
    assert track.startswith("run 0 · m")
    assert [repr(s) for s in found] == [
        "forward_backward 1 5..55",
        "  queued 5..15",
        "  compute 15..25",
        "  waiting 25..35",
        "  compute 35..50",
        "  commit 50..55",
    ]
    assert found[0].facts == {"request_id": "s:train:0-1", "seq": 1, "tokens": 10, "state": "done"}
    assert found[2].facts == {"pass": 4, "runs": 3, "tenants": 2, "tokens": 100}


def test_what_overlaps_is_in_rows_of_its_own(database: Database) -> None:
    timings = {"stretches": [[1, 0, 8, 1, 1, 1]], "computed": 8, "settled": 10}
    store(
        database,
        *(operation(seq, at, timings) for seq, at in ((1, 0), (2, 5), (3, 10), (4, 12), (5, 20))),
        operation(0, 0, timings, lane="s:sample:1", kind="sample"),
    )
    rows = {track: [s.name for s in found if s.depth == 0] for track, found in drawn(database).items()}
    assert sorted(rows.values()) == [
        ["forward_backward 1", "forward_backward 3"],
        ["forward_backward 2", "forward_backward 5"],
        ["forward_backward 4"],
        ["sample 0"],
    ]


def test_failed_unfinished_and_cut_operations(database: Database) -> None:
    cut = {"stretches": [[1, 0, 10, 1, 1, 1]], "computed": 40, "settled": 41, "more": 9}
    store(
        database,
        operation(1, 0, None, state="failed", error="x" * 1000),
        operation(2, 100, None, state="queued", finished_at=None),
        operation(3, 0, cut, lane="s:train:1"),
    )
    found = {s.name: s for track in drawn(database).values() for s in track}
    assert (found["forward_backward 1"].facts["error"], found["forward_backward 1"].end) == ("x" * 300, 0)
    assert (found["forward_backward 2"].end, found["not finished yet"].begin) == (10**6, 100)
    assert found["more passes"].facts == {"passes_not_shown": 9}


def test_long_sessions_come_in_pieces(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "BATCH", 3)
    timings = {"stretches": [], "computed": 1, "settled": 1}
    store(database, *(operation(seq, seq // 2, timings) for seq in range(7)))
    names = [s.name for track in drawn(database).values() for s in track if s.depth == 0]
    assert sorted(names) == [f"forward_backward {seq}" for seq in range(7)]


def test_a_session_without_operations_is_a_trace_too(database: Database) -> None:
    assert drawn(database) == {}


class TestOverHttp:
    def test_a_link_that_needs_no_key(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        world.finish(world.train(batch(run, 1))["request_id"], b"x", tokens=1)
        export = world.get(f"sessions/{session}/trace_export")
        assert export["status"] == "ready"
        reply = world.http.get(export["url"])
        assert reply.status_code == 200
        names = [s.name for track in slices(reply.content).values() for s in track]
        assert {"create 0", "forward_backward 1"} <= set(names)
        assert f"{session}.pftrace" in reply.headers["content-disposition"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert MODEL.encode() in reply.content

    def test_without_a_good_signature_there_is_nothing(self, world: World) -> None:
        session, other = world.session(), world.session()
        url = world.get(f"sessions/{session}/trace_export")["url"]
        plain = url.split("?")[0]
        assert world.http.get(plain).status_code == 403
        assert world.http.get(plain, headers={"x-api-key": world.key}).status_code == 403
        assert world.http.get(url.replace(session, other)).status_code == 403
        assert world.http.get(url.replace("expires=", "expires=1")).status_code == 403

    def test_foreign_sessions_are_404(self, world: World) -> None:
        world.get(f"sessions/{world.session()}/trace_export", key=world.other_key, status=404)
        world.get("sessions/x/trace_export", status=404)
