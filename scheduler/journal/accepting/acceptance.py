"""Durable acceptance: from a new operation to its body, its row and its request id, exactly once.

(lane, seq) names one operation for as long as its row is kept. While one is being accepted or is unfinished it is known
in memory, so that arrivals at the same moment are one; afterwards its row in the database knows it.

The most that an operation can cost is held in the commit of its row, and the row is the hold: it cannot be without
the operation, nor outlive it. An operation that cannot be paid for leaves nothing, so its number is still free.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import anyio.to_thread
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, make_transient

from billing.metering.quotas import Claim, QuotaReached, check, claim
from billing.money.accounts import Accounts, OutOfMoney, Payer
from billing.prices import PriceList, most_for_sample, most_for_tokens
from scheduler.journal.rows import TRAIN_KINDS, sent_sha256_of, small_text, to_row
from scheduler.links.messages import NEVER_CAME, READ, OpKind
from scheduler.order.operations import SAMPLE, NewOperation, Operation, SequenceReused
from store import logs, tables
from store.blobs.contract import Blobs, beside_the_loop
from store.database.bulk import insert_rows
from store.database.db import Database
from store.people.secret import new_id
from store.settings import Limits
from store.tracing import origin_here

log = logging.getLogger(__name__)

#: Larger bodies are written in a thread, so that the event loop goes on.
SMALL_BODY_BYTES = 1 << 18

#: Pauses between attempts to insert an operation while the database does not answer; its client waits meanwhile.
INSERT_AGAIN_S = (0.1, 0.3, 1.0, 3.0, 5.0)


@dataclass
class _Entry:
    """What this process knows of the operation (lane, seq), from the moment at which its acceptance begins."""

    id: str
    kind: str
    sent_sha256: str
    durable: asyncio.Future[None] | None = None  # None: it is durable

    def check(self, new: NewOperation) -> None:
        """Raise SequenceReused unless `new` is this operation again."""
        if self.kind == NEVER_CAME:
            raise SequenceReused(
                f"operation {new.seq} of {new.lane} comes too late: what was behind it has gone on without it, and it "
                "counts as failed. It was not run and is not billed: send it again under the next number"
            )
        if self.kind != new.kind or self.sent_sha256 != _digest(new):
            raise SequenceReused(
                f"operation {new.seq} of {new.lane} was already submitted as {self.kind} with another body: "
                "use the next sequence number"
            )


@dataclass(frozen=True)
class Taking:
    """The row of a new operation, the rows that come with it, and what it takes of its organisation's quotas."""

    row: dict[str, Any]
    others: tuple[tables.Base, ...] = ()
    claims: tuple[Claim, ...] = ()


class Acceptance:
    def __init__(self, database: Database, blobs: Blobs, prices: PriceList, limits: Limits) -> None:
        self._database = database
        self._blobs = blobs
        self._prices = prices
        self._limits = limits
        self._entries: dict[tuple[str, int], _Entry] = {}

    async def known(self, new: NewOperation, *, maybe_stored: bool) -> str | None:
        """The request id of `new` if it was accepted before (waiting until it is durable). The database is asked only
        if `maybe_stored`. Raises SequenceReused."""
        entry = self._entries.get((new.lane, new.seq))
        if entry is None and maybe_stored:
            there = await anyio.to_thread.run_sync(self._stored, new.lane, new.seq)
            entry = self._entries.get((new.lane, new.seq))  # its acceptance may have begun meanwhile
            if there is not None and (entry is None or entry.id != there.id):
                entry = there  # another replica was faster
        if entry is None:
            return None
        entry.check(new)
        if entry.durable is not None:
            await asyncio.shield(entry.durable)
        return entry.id

    async def take(self, new: NewOperation, rows: tuple[tables.Base, ...]) -> Operation:
        """Make `new` and `rows` durable in one commit. The caller has checked that it is not `known`. Raises OutOfMoney
        and QuotaReached."""
        entry = _Entry(new_id(), new.kind, _digest(new), asyncio.get_running_loop().create_future())
        assert entry.durable is not None
        self._entries[new.lane, new.seq] = entry
        op = _operation(new, entry.id, entry.sent_sha256)
        logs.note(run=op.run_id, operation=op.id)
        row = to_row(op, entry.sent_sha256)
        if new.refused is None:
            row["hold_nusd"] = most_nusd(self._prices, op)
        else:
            row |= {"state": "failed", "error": new.refused, "error_category": "user", "finished_at": op.accepted_at}
        try:
            await self._put_body(op.body_ref, new.body)
            await self._write(Taking(row, rows, self._claims(new)))
        except BaseException as error:
            self.forget(op)
            entry.durable.set_exception(error)
            entry.durable.exception()  # marks the error as seen, in case nobody else waits
            if op.body_ref and isinstance(error, OutOfMoney | QuotaReached):
                with suppress(OSError):  # the reaper deletes it later
                    await beside_the_loop(self._blobs, self._blobs.delete, op.body_ref)
            raise
        entry.durable.set_result(None)
        return op

    def _claims(self, new: NewOperation) -> tuple[Claim, ...]:
        if new.refused is not None:
            return ()
        runs = (claim(self._limits, "runs"),) if new.kind == OpKind.CREATE else ()
        return runs + ((claim(self._limits, "stored_bytes", new.stores_bytes),) if new.stores_bytes else ())

    async def _write(self, taking: Taking) -> None:
        """Insert the row, again if the database was away for a moment. The failed attempt may have taken effect: then
        the row exists, or its own hold is what makes money or quota short."""
        again = False
        for pause_s in (*INSERT_AGAIN_S, None):
            try:
                await self._database.write_batched(insert_all, taking, lock=taking.row["org_id"])
                return
            except OperationalError:
                if pause_s is None:
                    raise
                log.warning("operation %s: the database does not answer; again in %.1f s", taking.row["id"], pause_s)
                await asyncio.sleep(pause_s)
                again = True
            except (IntegrityError, OutOfMoney, QuotaReached):
                row = taking.row
                there = await anyio.to_thread.run_sync(self._stored, row["lane"], row["seq"]) if again else None
                if there is None or there.id != row["id"]:
                    raise
                return

    def forget(self, op: Operation) -> None:
        """Forget `op`, which has ended: from now on the row in the database answers for it."""
        self._entries.pop((op.lane, op.seq), None)

    def _stored(self, lane: str, seq: int) -> _Entry | None:
        with self._database.read() as session:
            row = session.scalars(select(tables.Operation).filter_by(lane=lane, seq=seq)).one_or_none()
        return _Entry(row.id, row.kind, sent_sha256_of(row)) if row is not None else None

    async def _put_body(self, body_ref: str, body: bytes) -> None:
        if body_ref and len(body) > SMALL_BODY_BYTES:
            await asyncio.to_thread(self._blobs.put, body_ref, body)
        elif body_ref:
            await beside_the_loop(self._blobs, self._blobs.put, body_ref, body)


def insert_all(session: Session, takings: list[Taking]) -> list[OutOfMoney | QuotaReached | None]:
    """Insert operations with their holds. An operation that cannot be paid for, or exceeds a quota, leaves nothing; its
    refusal is returned in its place. Run by `Database.write_batched`, under the locks of the organisations."""
    payers = [Payer(t.row["org_id"], t.row["project_id"], t.row["key_id"]) for t in takings]
    times = {taking.row["accepted_at"] for taking in takings}
    accounts = Accounts(session, set(payers), times, datetime.now(UTC))
    refusals: list[OutOfMoney | QuotaReached | None] = []
    taken: list[dict[str, Any]] = []
    coming: Counter[tuple[str, str]] = Counter()  # claims of this batch whose rows are not inserted yet
    for payer, taking in zip(payers, takings, strict=True):
        refusals.append(_take(session, accounts, payer, taking, coming))
        if refusals[-1] is None:
            taken.append(taking.row)
    accounts.store()
    if taken:
        insert_rows(session.connection(), tables.Operation, taken)
    return refusals


def _take(
    session: Session, accounts: Accounts, payer: Payer, taking: Taking, coming: Counter[tuple[str, str]]
) -> OutOfMoney | QuotaReached | None:
    try:
        for claim in taking.claims:
            check(session, payer.org_id, claim, coming[payer.org_id, claim.quota])
        if taking.row["state"] == "queued":  # a refused one only spends its number
            accounts.hold(payer, taking.row["hold_nusd"], taking.row["accepted_at"])
    except (OutOfMoney, QuotaReached) as refusal:
        return refusal
    for claim in taking.claims:
        if claim.quota != "runs":
            coming[payer.org_id, claim.quota] += claim.adds
    for other in taking.others:
        make_transient(other)  # a failed commit may have left it marked as stored
        session.add(other)
        session.flush()
    return None


def most_nusd(prices: PriceList, op: Operation) -> int:
    """The most that `op` can cost."""
    if op.kind in TRAIN_KINDS:
        kind = TRAIN_KINDS[OpKind(op.kind)]
        return most_for_tokens(prices, op.base_model, kind, op.tokens, op.accepted_at)
    if op.kind != SAMPLE:
        return 0
    prompt, samples = op.sample.prompt_tokens, op.sample.num_samples
    return most_for_sample(prices, op.base_model, prompt, samples, op.tokens - prompt, op.accepted_at)


def _digest(new: NewOperation) -> str:
    return hashlib.sha256(new.body if new.sent is None else new.sent).hexdigest()


def _operation(new: NewOperation, request_id: str, sent_sha256: str) -> Operation:
    read = new.kind == SAMPLE or new.kind in READ  # of all other kinds the body is stored nowhere
    has_body = bool(new.body) and read and new.refused is None
    # The body of a training operation is a file, however small: it is deleted as soon as a snapshot covers it.
    in_row = has_body and new.kind not in TRAIN_KINDS and small_text(new.body) is not None
    same = new.sent is None or new.sent == new.body
    return Operation(
        id=request_id,
        org_id=new.org_id,
        session_id=new.session_id,
        lane=new.lane,
        seq=new.seq,
        kind=new.kind,
        base_model=new.base_model,
        tokens=new.tokens,
        body=new.body if in_row else b"",
        body_ref=f"ops/{request_id[:2]}/{request_id}" if has_body and not in_row else "",
        plan=new.plan,
        accepted_at=datetime.now(UTC),
        key_id=new.key_id,
        user_id=new.user_id,
        project_id=new.project_id,
        body_bytes=len(new.body),
        stores_bytes=new.stores_bytes,
        body_sha256=(sent_sha256 if same else hashlib.sha256(new.body).hexdigest()) if has_body else "",
        origin=origin_here(),
    )
