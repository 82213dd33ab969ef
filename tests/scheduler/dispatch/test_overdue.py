"""A trainer takes too long: what was to blame, who is left alone, and what a restarted server still knows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler.dispatch import overdue
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.recovery import recover
from scheduler.links.contract import LIVES
from scheduler.links.messages import InLoss, PullPass
from scheduler.order.operations import NewOperation, Waiting
from store import tables
from tests.scheduler.journal.kit import RESULT, RUN, Service, create, first_pass, go, ops, outcome, run_row, train
from tests.scheduler.journal.test_losses import rows_of

OTHER = "s:train:1"


async def two_runs(service: Service) -> None:
    async with service.worker(service.trainer) as link:
        await first_pass(service, link)
        await service.journal.accept(create(OTHER), rows_of(OTHER))
        await service.answer(link, await service.ask(link, PullPass(["m"])))


def of_other(seq: int) -> NewOperation:
    return replace(train(seq), lane=OTHER)


def test_an_operation_whose_loss_overran_fails_at_once_and_its_neighbours_are_not_suspected(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        await two_runs(service)
        guilty = await service.journal.accept(train(1))
        good = await service.journal.accept(of_other(1))
        async with service.worker(service.trainer) as link:
            pass_ = await service.ask(link, PullPass(["m"]))
            while {guilty, good} - {op.op_id for op in pass_.ops}:
                await service.answer(link, pass_)
                pass_ = await service.ask(link, PullPass(["m"]))
            link.send(InLoss(good, 10, 0.1))
            link.send(InLoss())
            link.send(InLoss(guilty, 7, 0.1))
            await asyncio.sleep(0.2)
        failed = await outcome(service, guilty)
        assert failed.category == "user"
        assert "it took longer than the 0.1 s" in str(failed.error)
        [billed] = service.rows(tables.UsageEvent)
        assert (billed.operation_id, billed.quantity) == (guilty, 7)
        async with service.worker(service.trainer) as link:
            again = await service.ask(link, PullPass(["m"]))
            assert good in [op.op_id for op in again.ops]
            assert [row.attempts for row in service.rows(tables.Operation) if row.id == good] == [0]
            await service.answer(link, again)
            assert (await outcome(service, good)).payload == RESULT

    go(scenario())


def test_lost_trainers_are_counted_across_restarts_of_the_server(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
        killer = await service.journal.accept(train(1))
        for life in range(LIVES):
            assert isinstance(await service.journal.outcome("org", killer, 0.0), Waiting), life
            async with service.worker(service.trainer) as link:
                while killer not in [o.op_id for o in (await service.ask(link, PullPass(["m"]))).ops]:
                    pass
            await service.journal.training.flush()
            service.database.close()
            service = Service(folder)
            recover(service.journal, service.database)
        assert "stopped 3 times" in str((await outcome(service, killer)).error)

    go(scenario())


def test_a_trainer_that_cannot_even_end_itself_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "GRACE_S", 0.05)

    async def scenario() -> None:
        service = Service(folder)
        service.trainer = TrainerDesk(service.journal.training, pass_tokens=100, pass_limit_s=0.1)
        await service.journal.accept(create(), run_row(RUN))
        async with service.worker(service.trainer) as link:
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(0, False)]
            assert pass_.limit_s == pytest.approx(0.1)
            with pytest.raises(EOFError):
                await asyncio.to_thread(link.recv, 5.0)
        assert [row.attempts for row in service.rows(tables.Operation)] == [1]

    go(scenario())
