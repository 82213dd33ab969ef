"""Runs that are closed, or never came to be: what they have accepted ends, and so does what comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.recovery import recover
from scheduler.links.messages import Done, Failure, PassOver, PullPass
from scheduler.order.operations import Operation, RunClosed
from store import tables
from tests.scheduler.journal.kit import RUN, Service, create, first_pass, go, outcome, run_row, train


def test_a_run_whose_creation_failed_answers_everything_with_the_reason(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            made = await service.journal.accept(create(), run_row())
            queued = await service.journal.accept(train(1))
            pass_ = await service.ask(link, PullPass(["m"]))
            link.send(Done(made, failure=Failure("no such checkpoint", "user")))
            assert "never created: no such checkpoint" in str((await outcome(service, queued)).error)
            later = await service.journal.accept(train(2))
            assert "never created" in str((await outcome(service, later)).error)
            link.send(PassOver(pass_.pass_id, 0, 0, 0.0))
            assert (await service.ask(link, PullPass(["m"]))).release == [RUN]  # its memory is another's, at once

    go(scenario())


def test_a_closed_run_finishes_what_it_has_and_is_forgotten(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            queued, parked = await service.journal.accept(train(1)), await service.journal.accept(train(3))
            service.journal.close_run(RUN)
            with pytest.raises(RunClosed):
                await service.journal.accept(train(2))
            assert "before operation 2" in str((await outcome(service, parked)).error)
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert (await outcome(service, queued)).error is None
            assert (await service.ask(link, PullPass(["m"]))).release == [RUN]
            await service.journal.flush()
            assert service.rows(tables.Run)[0].state == "closed"
            assert RUN not in service.journal.training.runs

    go(scenario())


def test_a_run_that_is_closed_while_an_operation_is_accepted_fails_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was told 500 and asked again: queued nowhere, it held money and was waited for for ever."""
    take = Acceptance.take

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            await outcome(service, service.rows(tables.Operation)[0].id)

            async def closing(self: Acceptance, *new: Any) -> Operation:
                op = await take(self, *new)
                service.journal.close_run(RUN)
                return op

            monkeypatch.setattr(Acceptance, "take", closing)
            accepted = await service.journal.accept(train(1))
            assert f"run {RUN} was closed before this operation" in str((await outcome(service, accepted)).error)
            assert [row.state for row in service.rows(tables.Operation) if row.id == accepted] == ["failed"]
            assert await service.journal.accept(train(1)) == accepted  # a repeat

    go(scenario())


def test_an_operation_of_a_run_that_is_closed_fails_at_the_next_start(folder: Path) -> None:
    """A process that ends between the two leaves such an operation."""

    async def before() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            await service.journal.accept(train(1))
        service.database.write_now(lambda session: session.execute(update(tables.Run).values(state="closed")))

    async def after() -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        [accepted] = [row.id for row in service.rows(tables.Operation) if row.seq == 1]
        assert f"run {RUN} was closed before this operation" in str((await outcome(service, accepted)).error)
        assert RUN not in service.journal.training.runs

    go(before())
    go(after())


def test_a_repeat_to_a_run_that_is_closed_gets_its_first_id(folder: Path) -> None:
    """Also when numbers of the run were asked for before it ended."""

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            first = await service.journal.accept(train(1))
            assert await service.journal.taken(RUN, 1)
            second = await service.journal.accept(train(2))
            service.journal.close_run(RUN)
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert (await outcome(service, second)).error is None
            assert (await service.ask(link, PullPass(["m"]))).release == [RUN]
            await service.journal.flush()
            assert RUN not in service.journal.training.runs
            for seq, request_id in ((1, first), (2, second)):
                assert await service.journal.taken(RUN, seq)
                assert await service.journal.accept(train(seq)) == request_id

    go(scenario())
