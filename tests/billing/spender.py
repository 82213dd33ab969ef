"""A process that spends: `python -m tests.billing.spender URL THREADS TIMES AMOUNT`.

Each of its threads accepts TIMES operations of project "p" and key 1 that cost AMOUNT, and ends those that were
accepted: most with their whole cost, some with less, some failed. Prints what it has spent."""

from __future__ import annotations

import random
import sys
import threading
import uuid

from billing.accounts import OutOfMoney, Payer
from store.db import Database
from tests.billing.conftest import Till

PAYER = Payer("a", "p", 1)


def main(url: str, threads: int, times: int, amount: int) -> None:
    database = Database(url)
    till = Till(database, numbers=iter(random.Random().sample(range(10**15), 10**5)))
    spent: list[int] = []

    def spend() -> None:
        for turn in range(times):
            try:
                op = till.accept(amount, PAYER, op_id=uuid.uuid4().hex, run_id=uuid.uuid4().hex)
            except OutOfMoney:
                continue
            used = {} if turn % 7 == 6 else {"train": amount - 1 if turn % 5 == 4 else amount}
            spent.append(till.end(op, **used))

    workers = [threading.Thread(target=spend) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    database.close()
    print(sum(spent), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
