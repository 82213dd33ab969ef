"""A process that spends money: `python -m tests.billing.money.spender URL THREADS TIMES AMOUNT`.

Each of its threads accepts TIMES operations of project "p" and key 1 that cost AMOUNT, and ends those that were
accepted: most with their whole cost, some with less, some failed. Prints what it has spent.

With QUOTA as a fifth argument they cost nothing, store AMOUNT bytes of RUN each within that quota, and stay queued.
Prints what is to be stored."""

from __future__ import annotations

import random
import sys
import threading
import uuid

from billing.metering.quotas import Claim, QuotaReached
from billing.money.accounts import OutOfMoney, Payer
from store.database.db import Database
from tests.billing.conftest import Till

PAYER = Payer("a", "p", 1)
RUN = "s:train:0"


def main(url: str, threads: int, times: int, amount: int, quota: int = 0) -> None:
    database = Database(url)
    till = Till(database, numbers=iter(random.Random().sample(range(10**15), 10**5)))
    spent: list[int] = []
    stores = Claim("stored_bytes", quota, amount) if quota else None

    def spend() -> None:
        for turn in range(times):
            try:
                run_id = RUN if stores else uuid.uuid4().hex
                op = till.accept(0 if stores else amount, PAYER, None, uuid.uuid4().hex, run_id, stores)
            except (OutOfMoney, QuotaReached):
                continue
            if stores:
                spent.append(amount)
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
