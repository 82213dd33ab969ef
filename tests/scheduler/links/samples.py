"""A sample that waits in the queue on Redis."""

from __future__ import annotations

import msgspec

from scheduler.links.contract import Item
from scheduler.links.messages import SampleOp
from scheduler.links.redis_queue import RedisQueue


def push(queue: RedisQueue, name: str, adapter: str = "", org: str = "org") -> None:
    body = msgspec.msgpack.encode(SampleOp(name, "m", f"ops/{name}", 2))
    assert queue.push(Item(name, ("m", org, "interactive", "lane"), 10, body, slots=2, adapter=adapter))
