"""What waits for an operation that never comes gives its organisation's money back, and its run goes on without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from billing.reports.reconcile import check
from scheduler.journal import gaps
from scheduler.journal.recovery import recover
from scheduler.links.messages import PullPass
from scheduler.links.sockets import WorkerLink
from scheduler.order.operations import Waiting
from store.tables import Wallet
from tests.scheduler.journal.test_journal import Service, first_pass, folder, go, outcome, train  # noqa: F401


@asynccontextmanager
async def begun(folder: Path) -> AsyncIterator[tuple[Service, WorkerLink]]:  # noqa: F811
    """A service, and the link of its trainer, which has made the run."""
    service = Service(folder)
    async with service.worker(service.trainer) as link:
        await first_pass(service, link)
        yield service, link
    await service.journal.stop(1)
    service.database.close()


def held(service: Service) -> int:
    with service.database.read() as session:
        return session.get_one(Wallet, "org").held_nusd


@pytest.mark.parametrize("restarted", [False, True])
def test_a_parked_operation_is_given_up_and_its_hold_released(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    restarted: bool,
) -> None:
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            parked = [await service.journal.accept(train(seq)) for seq in (3, 4)]
            assert held(service) > 0
            if restarted:
                await service.journal.stop(1)
                service.database.close()
        if restarted:
            service = Service(folder)
            recover(service.journal, service.database)
        for seq, id in zip((3, 4), parked, strict=True):
            told = await outcome(service, id)
            assert told.category == "user"
            assert told.error is not None
            assert (
                f"operation {seq} has waited 0 s for operation 1 of run s:train:0, which has not arrived" in told.error
            )
        assert held(service) == 0
        assert check(service.database) == []
        late = [await service.journal.accept(train(seq)) for seq in (5, 2, 1)]  # 3 and 4 are spent
        async with service.worker(service.trainer) as link:
            ran: list[int] = []
            while len(ran) < 3:
                pass_ = await service.ask(link, PullPass(["m"]))
                await service.answer(link, pass_)
                ran += [op.seq for op in pass_.ops if not op.replay]
            assert ran == [1, 2, 5]
            assert [(await outcome(service, id)).error for id in late] == [None, None, None]
        assert held(service) == 0
        assert check(service.database) == []
        await service.journal.stop(1)
        service.database.close()

    go(scenario())


def test_who_comes_late_but_in_time_is_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.3)

    async def scenario() -> None:
        async with begun(folder) as (service, link):
            third = await service.journal.accept(train(3))
            await asyncio.sleep(0.2)
            await service.journal.accept(train(1))  # another 0.3 s for 2
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await asyncio.sleep(0.2)
            assert isinstance(await service.journal.outcome("org", third, 0), Waiting)

    go(scenario())


def test_what_waits_for_a_result_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """2 may be made of 1's result, which the trainer has not given yet."""
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        async with begun(folder) as (service, link):
            await service.journal.accept(train(1))
            third = await service.journal.accept(train(3))
            pass_ = await service.ask(link, PullPass(["m"]))
            await asyncio.sleep(0.5)
            assert isinstance(await service.journal.outcome("org", third, 0), Waiting)
            await service.answer(link, pass_)
            assert "waited 0 s for operation 2 of run" in ((await outcome(service, third)).error or "")

    go(scenario())


def test_while_the_process_stands_still_nothing_has_waited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 3.0)

    async def scenario() -> None:
        async with begun(folder) as (service, _):
            second = await service.journal.accept(train(2))
            await asyncio.sleep(0.1)
            time.sleep(3.5)  # noqa: ASYNC251
            await asyncio.sleep(0.1)
            assert isinstance(await service.journal.outcome("org", second, 0), Waiting)

    go(scenario())
