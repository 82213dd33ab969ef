"""What the database is asked for operations: so many statements for a batch, however many are in it; and work that
costs nothing writes no wallet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event

from billing.prices import load_prices
from scheduler.journal.accepting.acceptance import Taking, insert_all, most_nusd
from scheduler.journal.ending.settlement import Ending, Settlement, result_of
from scheduler.journal.rows import to_row
from scheduler.links.messages import Done
from scheduler.order.operations import Operation
from scheduler.order.plans import BODY_ONLY
from store import tables
from store.db import Database

NOW = datetime.now(UTC)
PRICES = load_prices()
#: Two for the mark of a commit. Accepting: accounts are read, operations inserted; what costs something sets a wallet.
#: Settling: operations are read and updated; what costs something reads accounts, inserts events, sums and entries, and
#: sets a wallet.
ACCEPTED = {"optim_step": 2 + 2, "forward_backward": 2 + 3}
SETTLED = {"optim_step": 2 + 2, "forward_backward": 2 + 7}


@contextmanager
def written(database: Database) -> Iterator[list[str]]:
    """The statements that its writer sends meanwhile, but BEGIN and COMMIT."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            found.append(statement)

    event.listen(database._write_engine, "before_cursor_execute", note)
    yield found
    event.remove(database._write_engine, "before_cursor_execute", note)


def operation(number: int, kind: str) -> Operation:
    tokens = 10 if kind == "forward_backward" else 0
    return Operation(f"op-{number}", "org", "s", "run", number, kind, "m", tokens, "", BODY_ONLY, NOW)


def together(database: Database, batch: Callable[..., Any], items: list[Any]) -> list[Any]:
    """Do `items` in one commit."""

    async def all_at_once() -> list[Any]:
        return list(await asyncio.gather(*(database.write_batched(batch, item, lock="org") for item in items)))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("many", [1, 20])
@pytest.mark.parametrize("kind", ["optim_step", "forward_backward"])
def test_a_batch_asks_so_often(database: Database, kind: str, many: int) -> None:
    def take(ops: list[Operation]) -> None:
        takings = [Taking(to_row(op, "") | {"hold_nusd": most_nusd(PRICES, op)}) for op in ops]
        assert together(database, insert_all, takings) == [None] * len(ops)

    database.write_now(lambda session: session.add(tables.Organisation(id="org", name="org", created_at=NOW)))
    take([operation(0, kind)])  # makes the wallet
    ops = [operation(1 + number, kind) for number in range(many)]
    with written(database) as accepting:
        take(ops)
    assert len(accepting) == ACCEPTED[kind], accepting
    done = [Done(op.id, b"{}", {"tokens": op.tokens}) for op in ops]
    endings = [Ending(op, end, result_of(op, end), "run") for op, end in zip(ops, done, strict=True)]
    with written(database) as settling:
        assert None not in together(database, Settlement(PRICES).settle, endings)
    assert len(settling) == SETTLED[kind], settling
    moved = [statement for statement in accepting + settling if statement.startswith("UPDATE wallets")]
    assert len(moved) == (2 if kind == "forward_backward" else 0)
