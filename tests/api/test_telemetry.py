from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path

from api.state.telemetry import Telemetry, TelemetryBatch
from tests.api.conftest import World

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BATCH = TelemetryBatch(events=[{"event": "SESSION_START"}, {"event": "SESSION_END"}], session_id="s", sdk_version="1")


def test_events_are_lines_of_their_organisation_and_day(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 10_000, 14)
    assert telemetry.keep("org", BATCH, NOW) == 2
    telemetry.keep("org", BATCH, NOW)
    lines = [json.loads(line) for line in (tmp_path / "2026-11-21" / "org.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[1] == {
        "at": "2026-11-21T12:00:00+00:00",
        "sdk_version": "1",
        "session_id": "s",
        "event": {"event": "SESSION_END"},
    }


def test_a_day_s_file_stops_growing(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 400, 14)
    kept = [telemetry.keep("org", BATCH, NOW) for _ in range(5)]
    assert sum(kept) == 3
    assert (tmp_path / "2026-11-21" / "org.jsonl").stat().st_size <= 400
    assert telemetry.keep("other", BATCH, NOW) == 2
    assert telemetry.keep("org", BATCH, NOW.replace(day=22)) == 2


def test_old_days_are_forgotten(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 10_000, 2)
    for day in (19, 20, 21):
        telemetry.keep("org", BATCH, NOW.replace(day=day))
    (tmp_path / "notes").mkdir()
    telemetry.forget_old(date(2026, 11, 21))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-11-20", "2026-11-21", "notes"]


def test_over_http(world: World) -> None:
    body = {"events": [{"event": "GENERIC_EVENT"}], "platform": "p", "sdk_version": "1", "session_id": "sessionless-1"}
    assert world.post("telemetry", body) == {"status": "accepted"}
    (path,) = (world.service.settings.data_dir / "telemetry").rglob("*.jsonl")
    assert json.loads(path.read_text())["session_id"] == "sessionless-1"
    for wrong in ({"events": [{}] * 1001}, {"events": [1]}, {"events": [], "session_id": "x" * 300}):
        world.post("telemetry", wrong, status=422)
