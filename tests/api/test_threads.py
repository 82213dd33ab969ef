"""No organisation takes all threads, however much it reads at once, and a client that has left has nothing read."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy.orm import Session

from api.routes.runs import metrics
from api.state.service import READS_AT_ONCE
from store import curves
from store.database.caller import Caller, become
from tests.api.conftest import World

#: More than there are threads.
MANY = 60


class Held:
    """Works that stay in their thread until they are let go."""

    def __init__(self) -> None:
        self.go, self._inside = threading.Event(), threading.Semaphore(0)

    def work(self, *_: Any) -> bool:
        self._inside.release()
        return self.go.wait(60)

    async def begun(self, count: int) -> bool:
        """Whether so many have begun, and no more."""
        for _ in range(count):
            assert await asyncio.to_thread(self._inside.acquire, timeout=30)
        await asyncio.sleep(0.05)
        return not self._inside.acquire(blocking=False)


def test_who_reads_much_at_once_leaves_threads_to_others(world: World) -> None:
    held, service = Held(), world.service

    async def story() -> None:
        become(Caller("acme", "key 1"))
        reads = [asyncio.ensure_future(service.read(held.work)) for _ in range(MANY)]
        assert await held.begun(READS_AT_ONCE)
        become(Caller("rival", "key 2"))
        assert await asyncio.wait_for(service.read(lambda _session: "read"), 30) == "read"
        held.go.set()
        assert await asyncio.gather(*reads) == [True] * MANY

    world.http.portal.call(story)  # type: ignore[union-attr]


def test_curves_are_read_one_at_a_time_and_leave_threads_to_colleagues(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have twelve million points: forty requests for them took every thread for minutes."""
    run, held = world.run(), Held()
    world.post(f"weft/runs/{run}/metrics", {"points": [{"name": "a", "step": 1, "value": 2.0}]})

    def slow(session: Session, *about: Any) -> curves.Curve:
        held.work()
        return curves.read_curve(session, *about)

    monkeypatch.setattr(metrics, "read_curve", slow)
    answers: list[int] = []
    asking = [
        threading.Thread(target=lambda: answers.append(world.call("GET", f"weft/runs/{run}/metrics").status_code))
        for _ in range(READS_AT_ONCE + 2)
    ]
    for thread in asking:
        thread.start()
    assert world.http.portal.call(held.begun, 1)  # type: ignore[union-attr]
    assert world.get(f"training_runs/{run}")["training_run_id"] == run
    held.go.set()
    for thread in asking:
        thread.join(30)
    assert answers == [200] * len(asking)


def test_of_a_client_that_has_left_no_curve_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = world.run(), list[str]()
    world.post(f"weft/runs/{run}/metrics", {"points": [{"name": "a", "step": 1, "value": 2.0}]})

    def noted(session: Session, org_id: str, run_id: str, name: str, limit: int) -> curves.Curve:
        read.append(name)
        return curves.read_curve(session, org_id, run_id, name, limit)

    monkeypatch.setattr(metrics, "read_curve", noted)
    headers = [(b"x-api-key", world.key.encode())]
    scope = {"type": "http", "method": "GET", "path": f"/api/v1/weft/runs/{run}/metrics", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("testserver", 80), "scheme": "http"}

    async def asked(gone: bool) -> None:
        async def receive() -> dict[str, Any]:
            if not gone:
                await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None: ...

        await world.http.app(dict(scope), receive, send)

    world.http.portal.call(asked, True)  # type: ignore[union-attr]
    assert read == []
    world.http.portal.call(asked, False)  # type: ignore[union-attr]
    assert read == ["a"]
