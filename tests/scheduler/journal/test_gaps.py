"""A run goes on without an operation that never comes, and a step that counts on that operation is told."""

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
from scheduler.links.messages import PullPass, TrainOp
from scheduler.links.sockets import WorkerLink
from scheduler.order.operations import SequenceReused, Waiting
from store.tables import Wallet
from tests.scheduler.journal.kit import RUN, Service, first_pass, go, outcome, train
from tests.waiting import until_async


@asynccontextmanager
async def begun(folder: Path) -> AsyncIterator[tuple[Service, WorkerLink]]:
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


def again(service: Service, folder: Path) -> Service:
    """The server is killed and starts again."""
    service.journal.training.stop()
    service.database.close()
    service = Service(folder)
    recover(service.journal, service.database)
    return service


async def sent(service: Service, link: WorkerLink, seqs: list[int]) -> list[TrainOp]:
    """What the trainer is given until it had these operations; it answers all of them."""
    given: list[TrainOp] = []
    while len(given) < len(seqs):
        pass_ = await service.ask(link, PullPass(["m"]))
        given += [op for op in pass_.ops if not op.replay]
        await service.answer(link, pass_)
    assert [op.seq for op in given] == seqs
    return given


@pytest.mark.parametrize("killed", ["never", "before", "after"])
def test_a_run_goes_on_without_what_never_came(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: str,
) -> None:
    """The client has used the numbers 1 and 2 for requests that a proxy refused, and cannot use them again."""
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
        parked = [await service.journal.accept(train(3)), await service.journal.accept(train(4, "optim_step"))]
        assert held(service) > 0
        if killed == "before":
            service = again(service, folder)
        await until_async(lambda service=service: not service.journal.training.runs[RUN].parked, 5)
        if killed == "after":
            service = again(service, folder)
        async with service.worker(service.trainer) as link:
            step = (await sent(service, link, [3, 4]))[1]
            number, told = step.lacks
            assert number == 2
            assert told.startswith("no step was taken: an operation before it never arrived")
            assert "operation 2 of run s:train:0 never arrived" in told
            assert "client_max_body_size" in told
            assert [(await outcome(service, id)).error for id in parked] == [None, None]
            for seq in (1, 2):
                assert await service.journal.taken(RUN, seq)
                with pytest.raises(SequenceReused, match=f"operation {seq} of s:train:0 comes too late"):
                    await service.journal.accept(train(seq))
            last = [await service.journal.accept(train(5)), await service.journal.accept(train(6, "optim_step"))]
            assert (await sent(service, link, [5, 6]))[1].lacks == (0, "")  # said once
            assert [(await outcome(service, id)).error for id in last] == [None, None]
        assert held(service) == 0
        assert check(service.database) == []
        await service.journal.stop(1)
        service.database.close()

    go(scenario())


def test_what_comes_while_its_number_is_given_up_is_one_of_both(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 is in the database, but not yet in the run, when the run is to go on without it."""
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        async with begun(folder) as (service, link):
            third = await service.journal.accept(train(3))
            put = service.journal.put
            monkeypatch.setattr(service.journal, "put", lambda op: None)
            second = await service.journal.accept(train(2))
            monkeypatch.setattr(service.journal, "put", put)
            await asyncio.sleep(0.5)
            service.journal.put(service.journal._open[second])
            await sent(service, link, [2, 3])
            assert [(await outcome(service, id)).error for id in (second, third)] == [None, None]

    go(scenario())


def test_a_number_far_beyond_all_others_is_given_up_itself(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        async with begun(folder) as (service, link):
            far = await service.journal.accept(train(10**12))
            told = await outcome(service, far)
            assert told.category == "user"
            assert "has waited 0 s for operation 1 of run s:train:0, which has not arrived" in (told.error or "")
            assert held(service) == 0
            assert check(service.database) == []
            next_one = await service.journal.accept(train(1))
            await sent(service, link, [1])
            assert (await outcome(service, next_one)).error is None

    go(scenario())


def test_an_operation_that_comes_before_the_limit_is_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_waits_for_a_result_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 may be made from 1's result, which the trainer has not given yet."""
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario() -> None:
        async with begun(folder) as (service, link):
            await service.journal.accept(train(1))
            third = await service.journal.accept(train(3))
            pass_ = await service.ask(link, PullPass(["m"]))
            await asyncio.sleep(0.5)
            assert isinstance(await service.journal.outcome("org", third, 0), Waiting)
            await service.answer(link, pass_)
            await sent(service, link, [3])
            assert (await outcome(service, third)).error is None

    go(scenario())


def test_while_the_process_stands_still_nothing_has_waited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 3.0)

    async def scenario() -> None:
        async with begun(folder) as (service, _):
            second = await service.journal.accept(train(2))
            await asyncio.sleep(0.1)
            time.sleep(3.5)  # noqa: ASYNC251
            await asyncio.sleep(0.1)
            assert isinstance(await service.journal.outcome("org", second, 0), Waiting)

    go(scenario())
