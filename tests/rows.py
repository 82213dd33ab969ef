"""Rows that tests put into the database by hand, with what a test does not care about filled in."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from store import tables
from store.database.db import Database
from store.database.works import Batch


def in_batch(database: Database, batch: Batch, item: Any, *, lock: str) -> Any:
    """Do `Database.write_batched` in a test without an event loop."""
    return asyncio.run(database.write_batched(batch, item, lock=lock))


def session_row(org_id: str, now: datetime, id: str = "s", **columns: Any) -> tables.Session:
    usual = {"state": "active", "sdk_version": "0", "tags": [], "user_metadata": {}}
    return tables.Session(id=id, org_id=org_id, created_at=now, last_seen_at=now, **usual | columns)


def run_row(org_id: str, now: datetime, id: str = "s:train:0", session_id: str = "s", **columns: Any) -> tables.Run:
    usual: dict[str, Any] = {"model_seq_id": 0, "base_model": "m", "rank": 8, "alpha": 32.0, "seed": 0}
    usual |= {"train_attn": True, "train_mlp": True, "train_unembed": True, "state": "live", "user_metadata": {}}
    times = {"created_at": now, "last_request_at": now}
    return tables.Run(id=id, org_id=org_id, session_id=session_id, **usual | times | columns)
