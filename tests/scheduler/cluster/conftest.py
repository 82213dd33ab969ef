"""Both carriers of the fair queue, with a clock that tests move."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from scheduler.links.contract import FairQueue
from scheduler.links.redis_queue import RedisQueue
from scheduler.order.local_queue import LocalQueue


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


Make = Callable[[Clock], FairQueue]


@pytest.fixture(params=["local", "redis"])
def make_queue(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes empty queues on one of the carriers."""
    if request.param == "local":
        yield LocalQueue
        return
    url, made = request.getfixturevalue("redis_url"), []

    def make(clock: Clock) -> FairQueue:
        made.append(RedisQueue(url, uuid.uuid4().hex, clock))
        return made[-1]

    yield make
    for queue in made:
        queue.close()
