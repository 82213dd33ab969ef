"""Which worker gets what is next, where one process speaks for them all: in the embedded service, and in the simulator.

The queue decides what is next, and whether a worker had better leave it to another (`FairQueue.lease`). Here workers
come to it in turn, the emptiest first, for one item each time: work spreads over them, and no slot is free while what
fits it waits. One that is alone takes all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scheduler.links.contract import FairQueue, Lease
from scheduler.order.roster import fullness

#: What is held is held until it ends, or its holder is known to be gone.
FOR_EVER = math.inf


@dataclass(eq=False)
class Offer:
    """The slots of one worker, as they are known here: `busy` are of what it holds."""

    worker: str
    models: Sequence[str] = ()
    free: int = 0
    busy: int = 0

    @property
    def fullness(self) -> float:
        return fullness(self.free, self.busy + self.free)


def announce(queue: FairQueue, offer: Offer) -> None:
    """Let the queue know what is free, before others are asked."""
    queue.lease(offer.worker, offer.models, offer.free, FOR_EVER, most=0)


def hand_out(queue: FairQueue, offers: Iterable[Offer], take: Callable[[str, Lease], None]) -> None:
    """Lease all that can be; `take` is told who has what, and fills the offer."""
    asking = [offer for offer in offers if offer.free > 0]

    def one(offer: Offer) -> bool:
        leases = queue.lease(offer.worker, offer.models, offer.free, FOR_EVER, most=1 if len(asking) > 1 else None)
        for lease in leases:
            take(offer.worker, lease)
        return bool(leases)

    while any(one(offer) for offer in sorted(asking, key=lambda offer: offer.fullness)):
        asking = [offer for offer in asking if offer.free > 0]
