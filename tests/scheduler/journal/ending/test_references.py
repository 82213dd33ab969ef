"""What a backup must hold: every file that a run, an answer or a conversation still needs, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from scheduler.journal.ending.references import needed_files
from scheduler.links.messages import RunSpec
from scheduler.order.plans import BODY_ONLY, Create, Plan, Save, Source
from store import tables
from store.database.db import Database
from tests.keys import create_key
from tests.rows import run_row, session_row

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def operation(run: str, seq: int, kind: str, state: str = "done", plan: Plan = BODY_ONLY, **columns: Any) -> Any:
    return tables.Operation(
        id=f"{run}-{seq}", org_id="", session_id=run, lane=f"{run}:train:0", seq=seq, kind=kind, base_model="m",
        state=state, tokens=0, body_ref=f"ops/{run}-{seq}", body_sha256="", plan=msgspec.to_builtins(plan),
        accepted_at=NOW, **columns,
    )  # fmt: skip


def test_files_that_are_needed(database: Database) -> None:
    spec = RunSpec("new:train:0", "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)
    loaded = Create(spec, "interactive", Source("weights/loaded", "tinker://a/weights/b", with_optimizer=True))
    operations = [
        operation("new", 1, "create", plan=loaded),
        operation("new", 2, "forward_backward"),
        operation("new", 3, "forward"),
        operation("new", 4, "optim_step", "failed"),
        operation("new", 5, "save_state", "queued", Save("weights", "a")),  # its folder may not be there yet
        operation("kept", 6, "optim_step", result_ref="results/6", result_bytes=10),
        operation("kept", 7, "optim_step", result_ref="results/7"),  # forgotten
        operation("kept", 8, "forward_backward"),
        operation("kept", 9, "save_state", plan=Save("weights", "a")),
        operation("kept", 10, "save_sampler", result_bytes=10),  # its result is in its row
        operation("broken", 1, "forward_backward"),
        operation("closed", 1, "forward_backward"),
        operation("closed", 2, "sample", "queued"),
    ]
    runs: dict[str, dict[str, Any]] = {
        "new": {},
        "kept": {"snapshot_seq": 7},
        "broken": {"snapshot_seq": 0, "broken": "a disk was full"},
        "closed": {"snapshot_seq": 0, "state": "closed"},
    }
    sampler = tables.Sampler(
        id="new:sample:0", session_id="new", sampling_session_seq_id=0, base_model="m", adapter_ref="", kind="base",
        created_at=NOW,
    )  # fmt: skip
    saved = tables.Checkpoint(
        id="c", run_id="kept:train:0", kind="weights", name="a", ref="weights/kept-9", size_bytes=1, public=False,
        user_metadata={}, created_at=NOW,
    )  # fmt: skip
    turn = tables.SessionTurn(request_id="q", name="chat", ref="turns/q", size_bytes=1, created_at=NOW)

    def write(session: Any) -> set[str]:
        org = create_key(session, "acme") and session.query(tables.Organisation).one().id
        for name, columns in runs.items():
            snapshot = f"runs/{name}" if "snapshot_seq" in columns else None
            session.add(session_row(org, NOW, name))
            session.flush()
            session.add(run_row(org, NOW, f"{name}:train:0", name, snapshot_ref=snapshot, **columns))
        for row in (*operations, sampler, saved, turn):
            row.org_id = org
            session.add(row)
        session.flush()
        return needed_files(session)

    assert database.write_now(write) == {
        *("ops/new-1", "ops/new-2", "ops/new-5", "ops/kept-8", "ops/closed-2"),
        *("weights/loaded", "weights/kept-9", "runs/kept", "results/6", "turns/q"),
    }
