"""What a polling client is told: what the operation waits for, its place, or that its result is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler.journal.journal import Journal
from scheduler.links.messages import PullPass, PullSamples
from scheduler.order import presence
from scheduler.order.operations import Gone, Waiting
from scheduler.order.plans import Create, ForwardBackward, Slice
from store import tables
from tests.scheduler.journal.kit import Service, create, first_pass, go, organisation, run_row, sample, train


async def waiting(journal: Journal, request_id: str) -> Waiting:
    found = await journal.outcome("org", request_id, 0.02)
    assert isinstance(found, Waiting)
    return found


def test_it_says_what_it_waits_for_and_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        creation = await service.journal.accept(create(), run_row())
        alone = await waiting(service.journal, creation)
        assert alone == Waiting("paused_capacity", "waiting for the trainer, which is starting; it is next")
        sampled = [await service.journal.accept(sample(seq)) for seq in range(3)]
        assert "the generator" in (await waiting(service.journal, sampled[0])).reason
        assert "about 2 pieces" in (await waiting(service.journal, sampled[2])).reason
        async with service.worker(service.trainer) as link:
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await service.journal.outcome("org", creation, 5)
            running = await service.journal.accept(train(1))
            queued = [await service.journal.accept(train(seq)) for seq in (2, 3)]
            await service.ask(link, PullPass(["m"]))
            queued.append(await service.journal.accept(train(4)))
            assert await waiting(service.journal, running) == Waiting("active", "running")
            last = await waiting(service.journal, queued[-1])
            assert last.state == "active"
            assert last.reason == "waiting for the trainer, which is busy; it is next"

    go(scenario())


def test_it_says_that_nobody_has_its_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server was started again with other models."""
    monkeypatch.setattr(presence, "GRACE_S", -1.0)

    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        creation = await service.journal.accept(create(), run_row())
        drawn = await service.journal.accept(sample(0))
        async with service.worker(service.trainer) as trainer, service.worker(service.generator) as generator:
            trainer.send(PullPass(["other"]))
            generator.send(PullSamples(["other"], 1))
            for request_id, worker in ((creation, "trainer"), (drawn, "generator")):
                async with asyncio.timeout(5):
                    while not (told := await waiting(service.journal, request_id)).unserved:
                        pass
                assert told.reason.startswith(f"no {worker} here has its base model m: it waits until one has. None ")
                assert told.state == "paused_capacity"

    go(scenario())


def test_operations_of_a_run_of_batch_priority_are_told_their_place_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        creation = create()
        assert isinstance(creation.plan, Create)
        batch = replace(creation, plan=Create(creation.plan.spec, "batch"))
        queued = [await service.journal.accept(batch, run_row())]
        queued += [await service.journal.accept(train(seq)) for seq in (1, 2)]
        told = [(await waiting(service.journal, request_id)).reason for request_id in queued]
        assert [reason.rpartition("; ")[2] for reason in told] == [
            "it is next",
            "about 1 pieces of work are ahead of it in fair order",
            "about 2 pieces of work are ahead of it in fair order",
        ]

    go(scenario())


def test_a_result_that_is_no_longer_kept_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            done = await service.journal.accept(train(1))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await service.journal.outcome("org", done, 5)
        (row,) = [row for row in service.rows(tables.Operation) if row.id == done]
        service.blobs.delete(row.result_ref)
        restarted = Service(tmp_path)
        assert await restarted.journal.outcome("org", done, 0.1) == Gone()
        assert await restarted.journal.outcome("other", done, 0.1) is None

    go(scenario())


def test_timings_are_settled_with_the_result(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            small = await service.journal.accept(train(1))
            halves = ForwardBackward((Slice(0, 1, 60), Slice(1, 2, 60)))
            large = await service.journal.accept(train(2, plan=halves))
            for _ in range(2):
                await service.answer(link, await service.ask(link, PullPass(["m"])))
            for request_id in (small, large):
                await service.journal.outcome("org", request_id, 5)
        rows = {row.id: row for row in service.rows(tables.Operation)}
        (stretch,) = rows[small].timings["stretches"]
        assert (stretch[0], stretch[3:]) == (2, [1, 1, 70])
        assert [s[0] for s in rows[large].timings["stretches"]] == [2, 3]
        for request_id in (small, large):
            facts = rows[request_id].timings
            ends = [moment for s in facts["stretches"] for moment in s[1:3]]
            assert ends == sorted(ends)
            assert ends[-1] <= facts["computed"] <= facts["settled"]

    go(scenario())
