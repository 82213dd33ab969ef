"""The ledger: each entry is added once, and the balance is the sum of all entries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.money.accounts import Payer
from billing.money.grants import expire, give, take
from billing.money.ledger import EntryType, post, refund_operation
from store import tables
from tests.billing.conftest import START, Till


def posted(till: Till, type: EntryType, amount_nusd: int, ref: str = "1", org_id: str = "a", **more: Any) -> bool:
    """Whether the entry was posted now, and not before."""
    facts: dict[str, Any] = {"org_id": org_id, "type": type, "amount_nusd": amount_nusd, "ref_type": "t", "ref_id": ref}
    return till.database.write_now(lambda session: post(session, **(facts | more)) is not None)


def test_each_reference_of_a_type_moves_the_balance_of_its_organisation_once(till: Till) -> None:
    moves: list[tuple[EntryType, int, str, str]] = [
        ("topup", 10, "1", "a"),
        ("topup", 1, "2", "a"),
        ("refund", 5, "1", "a"),
        ("chargeback", -40, "1", "a"),
        ("topup", 7, "1", "b"),
    ]
    assert [posted(till, *move) for move in moves] == [True] * 5
    assert [posted(till, type, 100, ref, org_id) for type, _, ref, org_id in moves] == [False] * 5
    assert posted(till, "topup", 100, ref_type="other")
    assert (till.wallet("a").balance_nusd, till.wallet("b").balance_nusd) == (10 + 1 + 5 - 40 + 100, 7)
    assert sorted(row.amount_nusd for row in till.rows(tables.LedgerEntry)) == [-40, 1, 5, 7, 10, 100]
    assert till.agrees()


def test_an_entry_of_nothing_is_a_mistake(till: Till) -> None:
    with pytest.raises(ValueError, match="adjustment t 1: the amount is 0"):
        posted(till, "adjustment", 0)
    assert till.rows(tables.LedgerEntry) == []
    assert [posted(till, "adjustment", amount, str(amount)) for amount in (1, -1)] == [True, True]


def test_an_entry_has_its_time_and_as_much_of_its_memo_as_fits(till: Till) -> None:
    before = datetime.now(UTC)
    assert posted(till, "topup", 1, "then", memo="x" * 255 + "yz", at=START)
    assert posted(till, "topup", 1, "now")
    then, now = sorted(till.rows(tables.LedgerEntry), key=lambda row: row.at)
    assert (then.at, then.memo) == (START, "x" * 255 + "y")
    assert before <= now.at <= datetime.now(UTC)
    assert now.memo == ""


def test_a_refund_is_all_that_the_operation_has_cost_this_organisation(till: Till) -> None:
    """The sum of all its events, and of no other operation's."""
    op, other, free = till.accept(30), till.accept(50), till.accept(1)
    till.end(op, train=7, sample=20)
    till.end(other, train=50)
    till.end(free)

    def refunded(op_id: str, org_id: str = "a") -> int | None:
        entry = till.database.write_now(lambda session: refund_operation(session, org_id, op_id))
        return entry.amount_nusd if entry is not None else None

    assert [refunded(op, "b"), refunded(free), refunded(op), refunded(op)] == [None, None, 27, None]
    assert till.wallet().balance_nusd == -50
    theirs = till.accept(3, Payer("b"))
    till.end(theirs, train=3)
    assert [refunded(theirs), refunded(theirs, "b")] == [None, 3]
    assert till.agrees()


def test_what_an_operator_takes_uses_up_credit_and_is_not_taken_again_at_its_end(till: Till) -> None:
    end = START + timedelta(days=1)
    till.database.write_now(lambda session: give(session, "a", 10, kind="paid", now=START) and None)
    till.database.write_now(lambda session: give(session, "a", 10, expires_at=end, now=START) and None)
    till.database.write_now(lambda session: take(session, "a", 12, "given by mistake") and None)
    assert posted(till, "topup", 20)
    assert expire(till.database, end) == {"expired": 0}
    assert till.wallet("a").balance_nusd == 10 + 10 - 12 + 20
    assert sorted(row.remaining_nusd for row in till.rows(tables.CreditGrant)) == [0, 8]
    assert till.agrees()
    with pytest.raises(ValueError, match="must be more than 0"):
        till.database.write_now(lambda session: take(session, "a", -1, "") and None)
