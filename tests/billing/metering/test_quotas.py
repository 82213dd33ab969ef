"""Quotas count only what an organisation itself still keeps, and let it keep as much as the limit and no more."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.metering.quotas import LOSSES_LAST, QUOTAS, Claim, QuotaReached, Standing, check, claim, standings
from store import tables
from store.database.db import Database
from store.settings import Limits

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
#: What `fill` makes "a" keep.
KEPT = {"stored_bytes": 50 + 7, "runs": 2, "sessions": 2, "custom_losses": 3, "turn_bytes": 30, "result_bytes": 90}


def fill(session: Session) -> None:
    """Both organisations keep these, "b" twice as many of each; what has ended counts for neither."""
    numbers = count()
    session.add_all([tables.Organisation(id=org, name=org, created_at=NOW) for org in ("a", "b")])
    session.flush()
    for org in ("a", "b", "b"):
        active, *others = _sessions(session, org, numbers)
        for run_id, state in (("train:0", "live"), ("train:1", "live"), ("train:2", "closed")):
            session.add(_run(f"{active}:{run_id}", org, active, state))
        for size_bytes, ended_at in ((20, None), (30, None), (400, NOW)):
            session.add(_span(f"p{next(numbers)}", org, size_bytes, ended_at))
        for owner in (active, *others):
            session.add(_operation(f"o{next(numbers)}", org, f"{owner}:loss", next(numbers)))
        session.add(_operation(f"o{next(numbers)}", org, f"{active}:train:0", next(numbers), stores_bytes=7))
        for result_bytes in (40, 50, None):
            done: dict[str, Any] = {"state": "done", "stores_bytes": 800, "result_bytes": result_bytes}
            session.add(_operation(f"o{next(numbers)}", org, f"{active}:train:0", next(numbers), **done))
        for size_bytes in (10, 20):
            name = f"t{next(numbers)}"
            facts = {"org_id": org, "name": "n", "ref": name, "size_bytes": size_bytes, "created_at": NOW}
            session.add(tables.SessionTurn(request_id=name, **facts))


def _sessions(session: Session, org: str, numbers: Iterator[int]) -> list[str]:
    """Two that are active, one whose losses are still kept, and three whose are not: of one a clock that was years
    ahead has said when it ended."""
    over = (*(NOW - LOSSES_LAST - hours * HOUR for hours in (1, 2)), NOW + timedelta(days=3650))
    ends = (None, None, NOW - LOSSES_LAST + HOUR, *over)
    rows = [
        tables.Session(
            id=f"s{next(numbers)}", org_id=org, state="ended" if ended_at else "active", sdk_version="1", tags=[],
            user_metadata={}, created_at=NOW, last_seen_at=NOW, ended_at=ended_at,
        )
        for ended_at in ends
    ]  # fmt: skip
    session.add_all(rows)
    session.flush()
    return [row.id for row in rows]


def _run(run_id: str, org: str, session_id: str, state: str) -> tables.Run:
    return tables.Run(
        id=run_id, org_id=org, session_id=session_id, model_seq_id=0, base_model="m", rank=1, alpha=1, seed=1,
        train_attn=True, train_mlp=True, train_unembed=True, state=state, user_metadata={}, created_at=NOW,
        last_request_at=NOW,
    )  # fmt: skip


def _span(span_id: str, org: str, size_bytes: int, ended_at: datetime | None) -> tables.StorageSpan:
    return tables.StorageSpan(
        id=span_id, org_id=org, checkpoint_id=span_id, run_id="r", session_id="s", base_model="m",
        size_bytes=size_bytes, started_at=NOW, ended_at=ended_at, metered_until=NOW,
    )  # fmt: skip


def _operation(op_id: str, org: str, lane: str, seq: int, state: str = "queued", **facts: Any) -> tables.Operation:
    return tables.Operation(
        id=op_id, org_id=org, session_id="s", lane=lane, seq=seq, kind="x", base_model="m", state=state, tokens=0,
        body_ref="", body_sha256="", plan={}, accepted_at=NOW, **facts,
    )  # fmt: skip


@pytest.fixture
def full(database: Database) -> Database:
    database.write_now(fill)
    return database


def test_what_is_kept_is_counted_for_its_organisation(full: Database) -> None:
    with full.read() as session:
        found = {of.name: of.used for of in standings(session, "a", Limits()) if of.used is not None}
        assert found == KEPT
        assert {of.name: of.used for of in standings(session, "b", Limits())} == {
            name: 2 * KEPT[name] if name in KEPT else None for name in QUOTAS
        }
        assert {of.used for of in standings(session, "nobody", Limits())} == {0, None}


def _told(full: Database, of: Claim, coming: int = 0, org_id: str = "a") -> str | None:
    """The reason for a refusal, which tells whether there will ever be room; None if there is room."""
    with full.read() as session:
        try:
            check(session, org_id, of, coming)
        except QuotaReached as refusal:
            return f"{refusal.ever}: {refusal}"
    return None


@pytest.mark.parametrize("quota", KEPT)
def test_the_last_of_it_can_be_had_and_nothing_beyond(full: Database, quota: str) -> None:
    used, what = KEPT[quota], QUOTAS[quota]
    assert _told(full, Claim(quota, used + 2, adds=2)) is None
    assert _told(full, Claim(quota, used + 2), coming=1) is None
    said = f"quota {quota} is {used + 2}: {used} {what.what}, and this would be 3 more; {what.remedy}, or ask the oper"
    assert said in (refused := _told(full, Claim(quota, used + 2, adds=3)) or "")
    assert refused.startswith("True: ")
    said = f"quota {quota} is {used + 2}: {used + 2} {what.what}, and this would be 1 more"
    assert said in (_told(full, Claim(quota, used + 2), coming=2) or "")


def test_a_request_larger_than_the_whole_quota_is_told_apart(full: Database) -> None:
    assert _told(full, Claim("archive_bytes", 5, adds=5)) is None
    refused = _told(full, Claim("archive_bytes", 5, adds=6)) or ""
    assert refused.startswith("False: the organisation's quota archive_bytes is 5, and this alone would be 6: ask the")
    assert (_told(full, Claim("archive_bytes", 5, adds=3), coming=3) or "").startswith("True: ")


def test_the_operator_s_limit_goes_before_the_default(full: Database) -> None:
    """Also a limit of 0; and it holds for that organisation alone."""

    def write(session: Session) -> None:
        session.get_one(tables.Organisation, "a").quotas = {"runs": 3, "sessions": 0}

    full.write_now(write)
    assert _told(full, Claim("runs", 1)) is None
    assert "quota runs is 3" in (_told(full, Claim("runs", 100, adds=2)) or "")
    assert "quota sessions is 0" in (_told(full, Claim("sessions", 100)) or "")
    assert _told(full, Claim("sessions", 100), org_id="b") is None
    with full.read() as session:
        found = {of.name: (of.limit, of.percent) for of in standings(session, "a", Limits(custom_losses_per_org=4))}
    assert (found["runs"], found["sessions"], found["custom_losses"]) == ((3, 66), (0, 100), (4, 75))


def test_the_default_is_the_setting_of_its_name() -> None:
    limits = Limits(**{of.default: number for number, of in enumerate(QUOTAS.values(), 1)})
    assert [claim(limits, quota) for quota in QUOTAS] == [Claim(q, number, 1) for number, q in enumerate(QUOTAS, 1)]
    assert claim(limits, "runs", 5).adds == 5


@pytest.mark.parametrize(
    ("used", "limit", "percent"), [(None, 4, 0), (0, 4, 0), (1, 3, 33), (3, 3, 100), (9, 3, 300), (0, 0, 100)]
)
def test_how_full_it_is(used: int | None, limit: int, percent: int) -> None:
    assert Standing("runs", limit, used).percent == percent
