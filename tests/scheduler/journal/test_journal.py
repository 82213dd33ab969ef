"""The journal with a real database, real blobs and real links; only the workers are played by the tests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from weft.wire.binary.sample_codec import decode_sample_response

from scheduler.journal.recovery import recover
from scheduler.links.contract import LIVES
from scheduler.links.messages import Done, Failure, PullPass, PullSamples, SampleWork, Snapshot, TrainOp
from scheduler.order.operations import Draining, QueueFull, SequenceReused, Waiting
from store import tables
from tests.scheduler.journal.kit import (
    ANSWERS,
    RESULT,
    RUN,
    Service,
    create,
    first_pass,
    go,
    ops,
    outcome,
    run_row,
    sample,
    save,
    train,
)


def test_an_operation_is_executed_metered_and_answered_once(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            first = await service.journal.accept(train(1))
            assert await service.journal.accept(train(1)) == first
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(1, False)]
            link.send(Done(first, b"result", {"tokens": 1_000_000}))
            link.send(Done(first, b"again", {"tokens": 1_000_000}))
            assert (await outcome(service, first)).payload == b"result"
            assert await service.journal.accept(train(1)) == first
            assert [(e.kind, e.quantity, e.run_id) for e in service.rows(tables.UsageEvent)] == [
                ("train", 1_000_000, RUN)
            ]
            (event,) = service.rows(tables.UsageEvent)
            assert event.amount_nusd == event.rate_uusd * 1000
            assert await service.journal.outcome("other", first, 0.1) is None

    go(scenario())


def test_a_sequence_number_cannot_be_used_for_something_else(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        await service.journal.accept(create(), run_row())
        await service.journal.accept(train(1))
        with pytest.raises(SequenceReused, match="operation 1 of"):
            await service.journal.accept(train(1, body=b"other"))
        with pytest.raises(SequenceReused):
            await service.journal.accept(train(1, "optim_step"))

    go(scenario())


def test_two_arrivals_at_the_same_moment_are_one_operation(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        await service.journal.accept(create(), run_row())
        ids = await asyncio.gather(*[service.journal.accept(train(1)) for _ in range(8)])
        assert len(set(ids)) == 1
        assert len([o for o in service.rows(tables.Operation) if o.seq == 1]) == 1

    go(scenario())


def test_a_gap_is_waited_for_and_named(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            late = await service.journal.accept(train(2))
            waiting = await service.journal.outcome("org", late, 0.05)
            assert waiting == Waiting("active", "waiting for operation 1 of this run, which has not arrived")
            await service.journal.accept(train(1))
            assert ops(await service.ask(link, PullPass(["m"]))) == [(1, False), (2, False)]

    go(scenario())


def test_errors_consume_their_number_and_are_not_billed(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            bad, good = [await service.journal.accept(train(seq)) for seq in (1, 2)]
            await service.ask(link, PullPass(["m"]))
            link.send(Done(bad, failure=Failure("datum 3 is not finite", "user")))
            link.send(Done(good, b"fine", {"tokens": 5}))
            failed = await outcome(service, bad)
            assert (failed.error, failed.category) == ("datum 3 is not finite", "user")
            assert (await outcome(service, good)).payload == b"fine"
            assert [e.operation_id for e in service.rows(tables.UsageEvent)] == [good]

    go(scenario())


def test_a_lost_trainer_is_rebuilt_by_replay_and_nothing_is_billed_twice(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            done = await service.journal.accept(train(1))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, done)
            lost = await service.journal.accept(train(2, "optim_step"))
            assert ops(await service.ask(link, PullPass(["m"]))) == [(2, False)]
        async with service.worker(service.trainer) as link:
            replayed = await service.ask(link, PullPass(["m"]))
            assert ops(replayed) == [(0, True), (1, True)]
            await service.answer(link, replayed)
            again = await service.ask(link, PullPass(["m"]))
            assert ops(again) == [(2, False)]
            await service.answer(link, again)
            assert (await outcome(service, lost)).error is None
        assert len(service.rows(tables.UsageEvent)) == 1

    go(scenario())


def test_an_operation_that_kills_trainers_is_given_up_and_its_neighbour_goes_on(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
        killer = await service.journal.accept(train(1))
        after = await service.journal.accept(train(2, "forward"))
        for _ in range(LIVES):
            async with service.worker(service.trainer) as link:
                while killer not in [o.op_id for o in (await service.ask(link, PullPass(["m"]))).ops]:
                    pass
        assert "stopped 3 times" in str((await outcome(service, killer)).error)
        async with service.worker(service.trainer) as link:
            for _ in range(2):
                await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert (await outcome(service, after)).error is None

    go(scenario())


def test_a_snapshot_frees_the_bodies_it_covers(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one = await service.journal.accept(train(1))
            pass_ = await service.ask(link, PullPass(["m"]))
            body = pass_.ops[0].body_ref
            assert service.blobs.get(body) == b"body"
            await service.answer(link, pass_)
            await outcome(service, one)
            assert service.blobs.get(body) == b"body"
            service.blobs.put("runs/x/state-1/adapter", b"state")
            link.send(Snapshot(RUN, 1, "runs/x/state-1"))
            await asyncio.sleep(0.2)
            assert not service.blobs.path(body).exists()
            assert service.rows(tables.Run)[0].snapshot_seq == 1
        async with service.worker(service.trainer) as link:
            await service.journal.accept(train(2))
            restored: TrainOp = (await service.ask(link, PullPass(["m"]))).ops[0]
            assert (restored.kind, restored.source_ref, restored.with_optimizer) == ("create", "runs/x/state-1", True)

    go(scenario())


def test_what_was_pending_before_a_restart_comes_before_what_is_repeated_behind_it(folder: Path) -> None:
    """Two saves are unanswered, a step after them is answered: they save the run as it was before that step."""

    async def before() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            for op in (save(1, "a"), save(2, "b"), train(3, "optim_step")):
                await service.journal.accept(op)
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(1, False), (2, False), (3, False)]
            step = pass_.ops[2]
            link.send(Done(step.op_id, ANSWERS["optim_step"], {"tokens": 10}))
            await outcome(service, step.op_id)

    async def after() -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        async with service.worker(service.trainer) as link:
            done: list[tuple[int, bool]] = []
            while len(done) < 4:
                pass_ = await service.ask(link, PullPass(["m"]))
                done += ops(pass_)
                await service.answer(link, pass_)
            assert done == [(0, True), (1, False), (2, False), (3, True)]

    go(before())
    go(after())


def test_after_a_restart_everything_accepted_is_there(folder: Path) -> None:
    async def before() -> list[str]:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            ids = [await service.journal.accept(train(1))]
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, ids[0])
            await service.journal.accept(replace(train(5, body=b"bad"), refused="no"))
            ids += [
                await service.journal.accept(train(2)),
                await service.journal.accept(train(4)),
                await service.journal.accept(sample(0)),
            ]
        return ids

    async def after(ids: list[str]) -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        assert (await outcome(service, ids[0])).payload == RESULT
        assert await service.journal.accept(train(1)) == ids[0]
        assert await service.journal.accept(train(2)) == ids[1]
        assert await service.journal.accept(train(4)) == ids[2]  # parked: 3 is still missing
        refused = await service.journal.accept(train(5, body=b"bad"))
        assert (await outcome(service, refused)).error == "no"
        async with service.worker(service.trainer) as link:
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(0, True), (1, True), (2, False)]
            await service.answer(link, pass_)
            await service.journal.accept(train(6))
            await service.journal.accept(train(3))
            assert ops(await service.ask(link, PullPass(["m"]))) == [(3, False), (4, False), (6, False)]
        async with service.worker(service.generator) as link:
            work: SampleWork = await service.ask(link, PullSamples(["m"], 4))
            assert [op.op_id for op in work.ops] == [ids[3]]

    ids: list[str] = []

    async def first() -> None:
        ids.extend(await before())

    go(first())
    go(after(ids))


def test_named_saves_refuse_a_used_name_through_the_future(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one, two = [await service.journal.accept(save(seq, "final")) for seq in (1, 2)]
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert json.loads((await outcome(service, one)).payload)["path"] == f"tinker://{RUN}/weights/final"
            refused = await outcome(service, two)
            assert refused.category == "user"
            assert "final exists already" in str(refused.error)
            assert len(service.rows(tables.Checkpoint)) == 1

    go(scenario())


def test_samples_go_to_free_slots_and_come_back_when_the_generator_dies(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        ids = [await service.journal.accept(sample(seq)) for seq in range(3)]
        async with service.worker(service.generator) as link:
            work: SampleWork = await service.ask(link, PullSamples(["m"], 3))
            assert [(op.op_id, op.num_samples, op.adapter_ref) for op in work.ops] == [
                (i, 2, "weights/a") for i in ids[:2]
            ]
        async with service.worker(service.generator) as link:
            again: SampleWork = await service.ask(link, PullSamples(["m"], 100))
            assert sorted(op.op_id for op in again.ops) == sorted(ids)
            for op in again.ops:
                link.send(
                    Done(op.op_id, b"text", {"prefill": 4, "cached_prefill": 4, "sample": 9}, drawn=({3: 8, 4: 1},))
                )
            assert [(await outcome(service, i)).payload for i in ids] == [b"text"] * 3
        assert sum(e.quantity for e in service.rows(tables.UsageEvent) if e.kind == "sample") == 27
        assert {e.run_id for e in service.rows(tables.UsageEvent)} == {RUN}
        assert [row.policy for row in service.rows(tables.Operation)] == [{"drawn": [{"3": 8, "4": 1}]}] * 3

    go(scenario())


def test_a_waiting_pull_is_served_the_moment_work_arrives(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as link:
            link.send(PullSamples(["m"], 2))
            await asyncio.sleep(0.05)
            waiting = asyncio.create_task(asyncio.to_thread(link.recv, 5.0))
            request = await service.journal.accept(sample(0))
            work: SampleWork = await waiting
            assert [op.op_id for op in work.ops] == [request]

    go(scenario())


def test_a_sample_that_waits_can_be_cancelled(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        first, second = [await service.journal.accept(sample(seq)) for seq in range(2)]
        assert not await service.journal.cancel("other", first)
        assert await service.journal.cancel("org", first)
        ended = await outcome(service, first)
        assert ended.error is None
        assert ended.payload is not None
        assert [len(each.tokens) for each in decode_sample_response(ended.payload).sequences] == [0, 0]
        async with service.worker(service.generator) as link:
            work: SampleWork = await service.ask(link, PullSamples(["m"], 9))
            assert [op.op_id for op in work.ops] == [second]
        assert service.rows(tables.UsageEvent) == []

    go(scenario())


def test_a_refused_request_spends_its_number(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            await service.journal.accept(train(3))
            for _ in range(2):
                refused = await service.journal.accept(replace(train(2, body=b"bad"), refused="token 9 is unknown"))
                assert (await outcome(service, refused)).error == "token 9 is unknown"
            await service.journal.accept(train(1))
            assert ops(await service.ask(link, PullPass(["m"]))) == [(1, False), (3, False)]
            assert [(o.seq, o.state) for o in service.rows(tables.Operation)][-2:].count((2, "failed")) == 1

    go(scenario())


def test_limits_and_draining_are_said_as_such(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder, max_queued=2)
        await service.journal.accept(create(), run_row())
        await service.journal.accept(train(1))
        with pytest.raises(QueueFull, match="limit is 2"):
            await service.journal.accept(train(2))
        service.journal.draining = True
        with pytest.raises(Draining):
            await service.journal.accept(train(2))
        assert await service.journal.accept(train(1))

    go(scenario())
