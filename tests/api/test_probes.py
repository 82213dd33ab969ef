"""Which faults take a replica out of its load balancer."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from api.routes.server import probes
from migrations.upgrade import head
from tests.api.conftest import World


def ready(world: World) -> tuple[int, str]:
    reply = world.http.get("/readyz")
    return reply.status_code, reply.json()["status"]


def test_what_concerns_this_replica_takes_it_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready(world) == (200, "ready")
    with monkeypatch.context() as patch:
        patch.setattr(probes, "head", lambda: "0999")
        assert ready(world) == (503, f"the database is at migration {head()}, this server needs 0999")
    world.service.journal.draining = True
    assert ready(world) == (503, "draining")


@pytest.mark.parametrize("hangs", [False, True])
def test_what_all_replicas_share_takes_none_out(world: World, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    async def away() -> None:
        if hangs:
            await asyncio.Event().wait()
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(probes, "ASKED_S", 0.05)
    world.service.__dict__["revision"] = away
    assert ready(world) == (200, "ready")
