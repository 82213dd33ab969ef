"""The weights that samplers sample from, as they are remembered."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update

from scheduler.journal.samples import samplers
from scheduler.journal.samples.samplers import Samplers
from store import tables
from store.database.db import Database
from tests.rows import session_row
from tests.scheduler.journal.kit import organisation

NOW = datetime.now(UTC)
RUN = "s:train:0"


@pytest.fixture
def database(any_database: Database) -> Database:
    """A database with five samplers that follow one run."""
    organisation(SimpleNamespace(database=any_database))  # type: ignore[arg-type]

    def put(session: Any) -> None:
        session.add(session_row("org", NOW, id="other"))
        session.flush()
        for number in range(5):
            session.add(
                tables.Sampler(
                    id=f"{number}", org_id="org", session_id="other", sampling_session_seq_id=number, base_model="m",
                    adapter_ref="weights/1", run_id=RUN, kind="inflight", created_at=NOW,
                )
            )  # fmt: skip

    any_database.write_now(put)
    return any_database


def save(database: Database, known: Samplers, ref: str) -> None:
    """Settle a save of the run: in the database, then in what is remembered."""
    database.write_now(lambda session: session.execute(update(tables.Sampler).values(adapter_ref=ref)))
    known.moved(RUN, ref)


def test_the_samplers_asked_for_last_are_remembered_and_all_move(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "MOST", 3)
    known, reads = Samplers(database), []
    read = Samplers._read
    monkeypatch.setattr(Samplers, "_read", lambda self, name: reads.append(name) or read(self, name))
    for name in ("0", "1", "2", "0", "3", "4"):
        known.facts(name)
    assert (reads, list(known._known)) == (["0", "1", "2", "3", "4"], ["0", "3", "4"])
    save(database, known, "weights/2")
    assert [known.facts(name).adapter_ref for name in ("0", "1", "4")] == ["weights/2"] * 3
    assert reads[5:] == ["1"]


def test_a_save_while_a_sampler_is_read_in_a_thread_is_not_missed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, read = Samplers(database), Samplers._read

    def then_saved(self: Samplers, name: str) -> Any:
        found = read(self, name)
        save(database, known, "weights/2")
        return found

    monkeypatch.setattr(Samplers, "_read", then_saved)
    assert asyncio.run(known.run_of("0")) == RUN
    monkeypatch.undo()
    assert known.facts("0").adapter_ref == "weights/2"
    assert asyncio.run(known.run_of("0")) == RUN
