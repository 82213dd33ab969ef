"""Operations that come in one commit count together, and a body is stored as the worker reads it."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from billing.metering.quotas import Claim, QuotaReached
from billing.money import ledger
from billing.money.accounts import OutOfMoney
from billing.money.wallets import set_mode
from billing.prices import KINDS, load_prices
from scheduler.journal.accepting.acceptance import Acceptance, Taking, insert_all, most_nusd
from scheduler.journal.rows import to_row
from scheduler.order.operations import NewOperation, Operation, SequenceReused
from scheduler.order.plans import BODY_ONLY, Plan, Sample
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import Limits
from tests.rows import run_row, session_row

NOW = datetime.now(UTC)


@pytest.fixture
def organisations(database: Database) -> Database:
    def write(session: Session) -> None:
        for org in ("a", "b"):
            session.add(tables.Organisation(id=org, name=org, created_at=NOW))
            session.flush()
            session.add(session_row(org, NOW, f"s of {org}"))
        session.flush()
        session.add(run_row("a", NOW, "r", "s of a"))

    database.write_now(write)
    return database


def taking(org: str, number: int, claim: Claim, *others: Any) -> Taking:
    op = Operation(f"{org}{number}", org, f"s of {org}", f"of {org}", number, "save_state", "m", 0, "", BODY_ONLY, NOW)
    row = to_row(op, "") | {"hold_nusd": 0, "stores_bytes": claim.adds if claim.quota == "stored_bytes" else 0}
    return Taking(row, others, (claim,))


def test_what_comes_together_keeps_to_a_quota_together(organisations: Database) -> None:
    """Bytes that are being received are in no table yet, but runs are: each counts once."""
    saves = [taking(org, number, Claim("stored_bytes", 100, 40)) for number in range(3) for org in ("a", "b")]
    runs = [
        taking("a", 10 + number, Claim("runs", 3), run_row("a", NOW, f"r{number}", "s of a")) for number in range(3)
    ]
    refusals = organisations.write_now(lambda session: insert_all(session, [*saves, *runs]))
    kept = [each.row["id"] for each, refusal in zip([*saves, *runs], refusals, strict=True) if refusal is None]
    assert kept == ["a0", "b0", "a1", "b1", "a10", "a11"]
    assert {type(refusal) for refusal in refusals} == {type(None), QuotaReached}
    with organisations.read() as session:
        assert sorted(row.id for row in session.query(tables.Operation)) == sorted(kept)
        assert sorted(row.id for row in session.query(tables.Run)) == ["r", "r0", "r1"]


@pytest.mark.parametrize(
    ("kind", "tokens", "plan", "most"),
    [
        ("forward_backward", 10, BODY_ONLY, 70),
        ("optim_step", 0, BODY_ONLY, 0),
        ("save_state", 10, BODY_ONLY, 0),
        # Read once at the higher rate, from the cache for each other; then what is drawn, and half for each rounding.
        ("sample", 100 + 3 * 20, Sample(3, 100, "interactive"), 100 * 2 + 2 * 100 * 1 + 3 * 20 * 5 + 1),
    ],
)
def test_the_most_that_an_operation_can_cost_is_held(kind: str, tokens: int, plan: Plan, most: int) -> None:
    rates = dict.fromkeys(KINDS, 0) | {"prefill": 2000, "cached_prefill": 1000, "sample": 5000, "train": 7000}
    book = {"version": "n", "effective_from": NOW.replace(year=2020), "models": {"*": rates}}
    op = Operation("op", "a", "s of a", "lane", 0, kind, "m", tokens, "", plan, NOW)
    assert most_nusd(load_prices([book | {"storage_uusd_per_gb_month": 1}]), op) == most


def train(seq: int, body: bytes, sent: bytes | None = None) -> NewOperation:
    return NewOperation("a", "s of a", "r", seq, "forward_backward", "m", 10, body, BODY_ONLY, sent=sent)


def test_a_completed_body_is_checked_as_it_is_and_known_as_it_was_sent(organisations: Database, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    acceptance = Acceptance(organisations, blobs, load_prices(), Limits())

    bodies = ((b"body", None), (b"body", b"body"), (b"sent, completed", b"sent"), (b"completed", b"sent"))

    async def story() -> None:
        for seq, new in enumerate(train(seq, *body) for seq, body in enumerate(bodies)):
            op = await acceptance.take(new, ())
            assert op.body_sha256 == hashlib.sha256(new.body).hexdigest()
            assert blobs.get(op.body_ref, op.body_sha256) == new.body
            for _ in range(2):  # in memory, and then stored
                assert await acceptance.known(new, maybe_stored=True) == op.id
                with pytest.raises(SequenceReused):
                    await acceptance.known(replace(new, sent=b"another"), maybe_stored=True)
                acceptance.forget(op)
            assert await acceptance.known(new, maybe_stored=False) is None
            assert await acceptance.known(train(seq + 10, b"body"), maybe_stored=True) is None

    asyncio.run(story())


def test_runs_and_saves_keep_to_quotas_and_nothing_else_does(organisations: Database, tmp_path: Path) -> None:
    limits = Limits(runs_per_org=1, stored_bytes_per_org=100)
    acceptance = Acceptance(organisations, FolderBlobs(tmp_path), load_prices(), limits)

    async def story() -> None:
        with pytest.raises(QuotaReached, match="quota runs is 1"):
            await acceptance.take(
                replace(train(0, b""), lane="r1", kind="create"), (run_row("a", NOW, "r1", "s of a"),)
            )
        with pytest.raises(QuotaReached, match="quota stored_bytes is 100"):
            await acceptance.take(replace(train(1, b""), kind="save_state", stores_bytes=101), ())
        for seq, kind in enumerate(("save_state", "forward_backward", "optim_step")):
            await acceptance.take(replace(train(seq, b"{}"), kind=kind, stores_bytes=100 if seq == 0 else 0), ())

    asyncio.run(story())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_begins_here_while_it_is_looked_for_is_that_which_is_stored(
    organisations: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    here, there = (Acceptance(organisations, FolderBlobs(tmp_path), load_prices(), Limits()) for _ in range(2))
    new, stored, takes = train(0, b"body"), here._stored, list[asyncio.Task[Operation]]()

    async def begin() -> None:
        takes.append(asyncio.create_task(here.take(new, ())))
        await asyncio.sleep(0)

    async def story() -> None:
        loop = asyncio.get_running_loop()

        def late(lane: str, seq: int) -> Any:
            found = stored(lane, seq)
            asyncio.run_coroutine_threadsafe(begin(), loop).result()
            return found

        async def write(*batch: Any, **lock: Any) -> Any:
            await gate.wait()
            return await written(*batch, **lock)

        first = (await there.take(new, ())).id if elsewhere else None
        gate, written = asyncio.Event(), organisations.write_batched
        monkeypatch.setattr(organisations, "write_batched", write)
        monkeypatch.setattr(here, "_stored", late)
        if not elsewhere:
            gate.set()
        known = await here.known(new, maybe_stored=True)
        gate.set()
        (mine,) = await asyncio.gather(*takes, return_exceptions=True)
        assert isinstance(mine, IntegrityError if elsewhere else Operation)
        assert known == (first if elsewhere else getattr(mine, "id", None))

    asyncio.run(asyncio.wait_for(story(), 5))


def test_what_cannot_be_paid_for_leaves_no_body_and_its_number_free(organisations: Database, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    acceptance = Acceptance(organisations, blobs, load_prices(), Limits())
    organisations.write_now(lambda session: set_mode(session, "a", "prepaid", 0))

    async def story() -> None:
        with pytest.raises(OutOfMoney):
            await acceptance.take(train(0, b"body"), ())
        assert blobs.listed("ops/*/*") == {}
        assert await acceptance.known(train(0, b"another"), maybe_stored=True) is None
        await acceptance.take(replace(train(9, b"body"), refused="no", stores_bytes=1 << 62), ())  # it takes no room
        organisations.write_now(
            lambda session: ledger.post(session, org_id="a", type="topup", amount_nusd=10**9, ref_type="t", ref_id="t")
        )
        op = await acceptance.take(train(0, b"another"), ())
        assert list(blobs.listed("ops/*/*")) == [op.body_ref]

    asyncio.run(story())


def test_a_number_that_another_replica_took_while_the_database_was_away_is_not_taken(
    organisations: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.journal.accepting.acceptance.INSERT_AGAIN_S", (0.0,))
    here, there = (Acceptance(organisations, FolderBlobs(tmp_path), load_prices(), Limits()) for _ in range(2))
    written = organisations.write_batched

    async def story() -> None:
        async def away(*_batch: Any, **_lock: Any) -> None:
            monkeypatch.setattr(organisations, "write_batched", written)
            await there.take(train(0, b"body"), ())
            raise OperationalError("COMMIT", {}, Exception("the connection is lost"))

        monkeypatch.setattr(organisations, "write_batched", away)
        with pytest.raises(IntegrityError):
            await here.take(train(0, b"body"), ())

    asyncio.run(story())
