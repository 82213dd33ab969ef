"""Which worker gets what is next, where one process speaks for them all: in the embedded service, and in the simulator.

The queue decides what is next, and whether a worker had better leave it to another (`FairQueue.lease`). Here workers
take turns, the emptiest first, each leasing one item at a time: work spreads over them, and no slot stays free while an
item that fits it waits. A single worker leases all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scheduler.links.contract import FairQueue, Lease
from scheduler.order.roster import fullness

#: An item is leased until it ends, or its worker is known to be gone.
FOR_EVER = math.inf


@dataclass(eq=False)
class Offer:
    """One worker's slots as this process knows them; `busy` are taken by the items that it holds. Without a free one,
    it sets others aside for up to `yields` (`FairQueue.lease`)."""

    worker: str
    models: Sequence[str] = ()
    free: int = 0
    busy: int = 0
    yields: int = 0

    @property
    def fullness(self) -> float:
        slots = self.busy + self.free  # none: all has ended, and what is free now is not told yet
        return fullness(self.free, slots) if slots else 1.0

    @property
    def open(self) -> bool:
        return self.free > 0 or self.yields > 0

    def fill(self, slots: int) -> None:
        """An item of so many slots has been taken."""
        if self.free > 0:
            self.free -= slots
        else:
            self.yields -= slots
        self.busy += slots


def announce(queue: FairQueue, offer: Offer) -> None:
    """Tell the queue how many slots are free, before items are leased to any worker."""
    queue.lease(offer.worker, offer.models, offer.free, FOR_EVER, most=0)


def hand_out(queue: FairQueue, offers: Iterable[Offer], take: Callable[[str, Lease], None]) -> None:
    """Lease every item that fits. `take` is called with each worker and its lease, and must update that worker's
    offer."""
    asking = [offer for offer in offers if offer.open]

    def one(offer: Offer) -> bool:
        most = 1 if len(asking) > 1 else None
        leases = queue.lease(offer.worker, offer.models, offer.free, FOR_EVER, most, offer.yields)
        for lease in leases:
            take(offer.worker, lease)
        return bool(leases)

    while any(one(offer) for offer in sorted(asking, key=lambda offer: offer.fullness)):
        asking = [offer for offer in asking if offer.open]
