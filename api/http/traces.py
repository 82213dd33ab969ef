"""A session's operations as a trace that Perfetto opens (https://ui.perfetto.dev): protobuf, streamed in pieces.

    session ─ run 0 ─ operations:   [ forward_backward 3                       ]
                                    [ queued ][ compute ][ waiting ][ compute ][ commit ]

One track for each run and sampler. Its operations overlap, since clients send ahead, so they are laid out in as few
rows as they need; Perfetto shows rows of one name as one track. "compute" says how many runs and tenants shared the
pass, as counts, and nothing else about anybody else. Times are the server's wall clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, and_, or_, select

from store import tables
from store.database.db import Database

#: How many operations are read, and pieces of a trace built, at a time.
BATCH = 500
#: How many characters of an error a trace quotes.
ERROR_LENGTH = 300

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SEQUENCE = 1  # all packets are of one writer
# numbers of clocks in perfetto.protos.BuiltinClock; track events use boot time unless they say otherwise
_REALTIME, _BOOTTIME = 1, 6
_PROCESS_TRACK = 1

_Op = tables.Operation
_COLUMNS = (
    _Op.id, _Op.lane, _Op.seq, _Op.kind, _Op.base_model, _Op.state, _Op.tokens, _Op.error, _Op.accepted_at,
    _Op.finished_at, _Op.timings,
)  # fmt: skip


def trace(database: Database, session_id: str, now: datetime | None = None) -> Iterator[bytes]:
    """The trace, piece by piece; their concatenation is the file. To be run in threads: it reads the database."""
    writer = _Writer(session_id, now or datetime.now(UTC))
    yield writer.take()
    for rows in _batches(database, session_id):
        for row in rows:
            writer.operation(row)
        yield writer.take()


def _batches(database: Database, session_id: str) -> Iterator[list[Row[Any]]]:
    """The session's operations, in the order of their acceptance."""
    query = select(*_COLUMNS).where(_Op.session_id == session_id).order_by(_Op.accepted_at, _Op.id).limit(BATCH)
    after = None
    while True:
        page = query
        if after is not None:
            same_time = and_(_Op.accepted_at == after.accepted_at, _Op.id > after.id)
            page = query.where(or_(_Op.accepted_at > after.accepted_at, same_time))
        with database.read() as session:
            rows = list(session.execute(page))
        yield rows
        if len(rows) < BATCH:
            return
        after = rows[-1]


class _Writer:
    """Turns operations into packets. Tracks are announced when their first operation comes."""

    def __init__(self, session_id: str, now: datetime) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # a large import, needed only here

        self._pb = perfetto_trace_pb2
        self._now = now
        self._trace = self._pb.Trace()
        self._tracks = _PROCESS_TRACK
        self._lanes: dict[str, int] = {}
        self._rows: dict[str, list[tuple[int, int]]] = {}  # by lane: a heap of (time from which the row is free, track)
        self._clock(_ns(now))
        descriptor = self._packet().track_descriptor
        descriptor.uuid = _PROCESS_TRACK
        descriptor.process.pid = 1
        descriptor.process.process_name = f"session {session_id}"

    def take(self) -> bytes:
        """The bytes of the trace that were written since the last call."""
        piece: bytes = self._trace.SerializeToString()
        self._trace.Clear()
        return piece

    def operation(self, row: Row[Any]) -> None:
        start = _ns(row.accepted_at)
        timings: dict[str, Any] = row.timings or {}
        end = start + 1000 * timings["settled"] if timings else _ns(row.finished_at or max(self._now, row.accepted_at))
        track = self._row_for(row, start, end)
        facts = {"request_id": row.id, "seq": row.seq, "tokens": row.tokens, "state": row.state}
        if row.error:
            facts["error"] = row.error[:ERROR_LENGTH]
        self._begin(track, start, f"{row.kind} {row.seq}", facts)
        if timings:
            self._stages(track, start, timings)
        elif row.state == "queued":
            self._slice(track, start, end, "not finished yet")
        self._end(track, end)

    def _stages(self, track: int, start: int, timings: dict[str, Any]) -> None:
        at = start
        for number, (pass_id, begin, end, runs, tenants, tokens) in enumerate(timings["stretches"]):
            self._slice(track, at, start + 1000 * begin, "waiting" if number else "queued")
            facts = {"runs": runs, "tenants": tenants, "tokens": tokens} | ({"pass": pass_id} if pass_id else {})
            at = start + 1000 * end
            self._slice(track, start + 1000 * begin, at, "compute", facts)
        computed = start + 1000 * timings["computed"]
        rest = {"passes_not_shown": timings["more"]} if "more" in timings else {}
        waited = "waiting" if timings["stretches"] else "queued"
        self._slice(track, at, computed, "more passes" if rest else waited, rest)
        self._slice(track, computed, start + 1000 * timings["settled"], "commit")

    def _row_for(self, row: Row[Any], start: int, end: int) -> int:
        """The track of a row of the lane that is free at `start`."""
        rows = self._rows.setdefault(row.lane, [])
        if rows and rows[0][0] <= start:
            track = heapq.heappop(rows)[1]
        else:
            track = self._new_track(self._lane(row), "operations")
        heapq.heappush(rows, (end, track))
        return track

    def _lane(self, row: Row[Any]) -> int:
        if row.lane not in self._lanes:
            _, _, name = row.lane.partition(":")
            title = f"{name.replace('train:', 'run ').replace('sample:', 'sampler ')} · {row.base_model}"
            self._lanes[row.lane] = self._new_track(_PROCESS_TRACK, title)
        return self._lanes[row.lane]

    def _new_track(self, parent: int, name: str) -> int:
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid, descriptor.parent_uuid, descriptor.name = self._tracks, parent, name
        return self._tracks

    def _slice(self, track: int, start: int, end: int, name: str, facts: dict[str, Any] | None = None) -> None:
        if end > start:
            self._begin(track, start, name, facts or {})
            self._end(track, end)

    def _begin(self, track: int, at: int, name: str, facts: dict[str, Any]) -> None:
        event = self._event(track, at, self._pb.TrackEvent.TYPE_SLICE_BEGIN)
        event.name = name
        event.categories.append("weft")
        for key, value in facts.items():
            annotation = event.debug_annotations.add(name=key)
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = str(value)

    def _end(self, track: int, at: int) -> None:
        self._event(track, at, self._pb.TrackEvent.TYPE_SLICE_END)

    def _event(self, track: int, at: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = at
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event

    def _clock(self, at: int) -> None:
        """Write that our timestamps are real time."""
        snapshot = self._packet().clock_snapshot
        for clock in (_BOOTTIME, _REALTIME):
            snapshot.clocks.add(clock_id=clock, timestamp=at)

    def _packet(self) -> Any:
        return self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)


def _ns(at: datetime) -> int:
    """Nanoseconds since 1970, exact to the microsecond."""
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000
