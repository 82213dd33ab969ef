"""Limits hold to the nano-dollar with 200 threads in 4 processes, and nothing stays held after kill -9."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select

from billing.money import ledger
from billing.money.accounts import Payer
from billing.money.budgets import Scope, set_budget
from store import tables
from tests.billing.conftest import Till
from tests.billing.money.spender import RUN
from tests.forked import Forked
from tests.rows import run_row, session_row
from tests.search import chance

PAYER = Payer("a", "p", 1)
LIMIT = 10_000


def spenders(till: Till, processes: int, threads: int, times: int, *numbers: int) -> list[Forked]:
    arguments = [till.database.url, *map(str, (threads, times, *numbers))]
    return [Forked("-m", "tests.billing.money.spender", *arguments) for _ in range(processes)]


def limit(till: Till, by: str) -> None:
    """Let `by` allow LIMIT, and everything else far more."""
    much = 100 * LIMIT
    till.mode("prepaid")
    till.database.write_now(
        lambda session: ledger.post(
            session,
            org_id="a",
            type="topup",
            amount_nusd=LIMIT if by == "wallet" else much,
            ref_type="t",
            ref_id="t",
        )
    )
    scopes: dict[Scope, str] = {"org": "a", "project": "p", "key": "1"}
    for scope, scope_id in scopes.items():
        amount = LIMIT if scope == by else much
        till.database.write_now(
            lambda session, scope=scope, scope_id=scope_id, amount=amount: set_budget(  # type: ignore[misc]
                session, "a", scope, scope_id, "month", amount
            )
        )


@pytest.mark.parametrize("by", ["wallet", "project", "key"])
def test_200_threads_in_4_processes_do_not_overspend(till: Till, by: str) -> None:
    limit(till, by)
    processes = spenders(till, 4, 50, 1, 67)
    spent = sum(int(process.communicate(timeout=120)[0]) for process in processes)
    assert [process.returncode for process in processes] == [0] * 4
    wallet = till.wallet()
    assert spent == sum(event.amount_nusd for event in till.rows(tables.UsageEvent))
    assert LIMIT - 67 < spent <= LIMIT  # all that could be spent was spent
    assert wallet.held_nusd == 0
    assert till.refused(LIMIT - spent + 1, PAYER).available_nusd == LIMIT - spent
    till.accept(LIMIT - spent, PAYER)  # to the last nano-dollar
    assert till.agrees()


def test_40_threads_in_2_processes_do_not_pass_a_quota(till: Till) -> None:
    """Two replicas of the API, each with its own connections."""
    now = datetime.now(UTC)
    for row in (session_row("a", now), run_row("a", now, RUN)):
        till.database.write_now(lambda session, row=row: session.add(row))  # type: ignore[misc]
    stored = sum(int(process.communicate(timeout=120)[0]) for process in spenders(till, 2, 20, 20, 17, 1000))
    assert stored == sum(row.stores_bytes for row in till.rows(tables.Operation))
    assert 1000 - 17 < stored <= 1000  # all that the quota allows is to be stored


@pytest.mark.search
def test_nothing_stays_held_after_kill_9(till: Till) -> None:
    """Processes are killed at any moment of their work; what they had accepted is then ended by another."""
    limit(till, "key")
    luck = chance(3)
    for _ in range(4):
        (process,) = spenders(till, 1, 20, 10_000, 1)
        before = count(till)
        deadline = time.monotonic() + 60
        while count(till) < before + 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(luck.random() * 0.05)
        process.kill()
        process.communicate()
        assert till.agrees()
    open_ops = [row.id for row in till.rows(tables.Operation) if row.state == "queued"]
    assert till.wallet().held_nusd == len(open_ops)
    for op in open_ops:
        assert till.end(op, train=1) == 1
    assert till.wallet().held_nusd == 0
    assert till.agrees()
    spent = sum(event.amount_nusd for event in till.rows(tables.UsageEvent))
    assert till.wallet().balance_nusd == 100 * LIMIT - spent
    assert spent <= LIMIT


def count(till: Till) -> int:
    with till.database.read() as session:
        return session.scalar(select(func.count()).select_from(tables.Operation)) or 0


@pytest.mark.parametrize("step", ["accept", "end"])
def test_a_commit_that_fails_moves_nothing(till: Till, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stops between the statements of a transaction: as if it had never begun."""
    limit(till, "wallet")
    op = till.accept(10, PAYER)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(
            f"{'billing.metering.charges' if step == 'end' else 'scheduler.journal.accepting.acceptance'}.insert_rows",
            stop,
        )
        with pytest.raises(KeyboardInterrupt):
            till.end(op, train=10) if step == "end" else till.accept(5, PAYER)
    assert (till.wallet().held_nusd, till.wallet().balance_nusd) == (10, LIMIT)
    assert till.end(op, now=datetime.now(UTC), train=10) == 10
    assert till.agrees()
