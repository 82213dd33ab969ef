"""What clients report about themselves, kept for the operator: one JSON line for each event, in a file for each
organisation and day, `telemetry/<day>/<organisation>.jsonl` in the data folder.

Bounded: a day's file stops growing at a limit, and days that are old are deleted. Nothing else reads it.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

#: Tinker's client sends at most 100 events at a time.
MAX_EVENTS = 1000
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


class TelemetryBatch(BaseModel):
    """Events of one client. The kinds of events differ between versions of clients, so they are not modelled."""

    model_config = ConfigDict(extra="ignore")
    events: list[dict[str, Any]] = Field(max_length=MAX_EVENTS)
    platform: str | None = Field(default=None, max_length=256)
    sdk_version: str | None = Field(default=None, max_length=64)
    session_id: str | None = Field(default=None, max_length=256)
    process_uuid: str | None = Field(default=None, max_length=256)


class Telemetry:
    """The files. One per process; safe from any thread."""

    def __init__(self, folder: Path, bytes_per_day: int, days: int) -> None:
        self._folder = folder
        self._bytes_per_day = bytes_per_day
        self._days = days
        self._lock = threading.Lock()

    def keep(self, org_id: str, batch: TelemetryBatch, now: datetime | None = None) -> int:
        """Append the events that today's file has room for. Returns how many."""
        now = now or datetime.now(UTC)
        client = batch.model_dump(exclude={"events"}, exclude_none=True)
        about = {"at": now.isoformat(), **client}
        # orjson would refuse some valid JSON: integers beyond 64 bits, lone surrogates.
        lines = [json.dumps({**about, "event": event}).encode() + b"\n" for event in batch.events]
        path = self._folder / now.date().isoformat() / f"{org_id}.jsonl"
        with self._lock:
            room = self._bytes_per_day - (path.stat().st_size if path.exists() else 0)
            kept = 0
            for line in lines:
                room -= len(line)
                if room < 0:
                    break
                kept += 1
            if kept:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(b"".join(lines[:kept]))
        return kept

    def forget_old(self, today: date | None = None) -> None:
        """Delete the files of days that are too old."""
        first = (today or datetime.now(UTC).date()) - timedelta(days=self._days - 1)
        for folder in self._folder.glob("*"):
            if _DAY.fullmatch(folder.name) and folder.name < first.isoformat():
                shutil.rmtree(folder, ignore_errors=True)
