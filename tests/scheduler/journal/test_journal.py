"""The journal with a real database, real blobs and real links; only the workers are played by the tests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select, update
from weft.wire.binary.sample_codec import decode_sample_response

from billing.prices import load_prices
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.journal import Journal
from scheduler.journal.recovery import recover
from scheduler.links.contract import LIVES
from scheduler.links.messages import (
    Done,
    Failure,
    Pass,
    PassOver,
    PullPass,
    PullSamples,
    RunSpec,
    SampleWork,
    Snapshot,
    TrainOp,
)
from scheduler.links.sockets import ServerLink, WorkerLink
from scheduler.order.operations import (
    Draining,
    NewOperation,
    Operation,
    Outcome,
    QueueFull,
    RunClosed,
    SequenceReused,
    Waiting,
)
from scheduler.order.plans import BODY_ONLY, Create, Plan, Sample, Save
from store import tables
from store.blobs.folder import FolderBlobs
from store.blobs.room import Room
from tests import rows
from tests.migrated import database_in

NOW = datetime.now(UTC)
RUN = "s:train:0"
#: Too large for a row, so it is stored as a file.
RESULT = b"result" * 200
ANSWERS = {"forward": RESULT, "forward_backward": RESULT, "optim_step": b"result"}


class Service:
    """A journal on a data folder, and the two desks."""

    def __init__(self, folder: Path, max_queued: int = 100, room: Room | None = None) -> None:
        self.database = database_in(folder)
        self.blobs = FolderBlobs(folder / "blobs")
        self.journal = Journal(self.database, self.blobs, load_prices(), max_queued, room=room)
        self.trainer = TrainerDesk(self.journal.training, pass_tokens=100)
        self.generator = SampleDesk(self.journal)

    @asynccontextmanager
    async def worker(self, desk: TrainerDesk | SampleDesk) -> AsyncIterator[WorkerLink]:
        """Attach a worker; leaving the context is its death."""
        ours, theirs = socket.socketpair()
        link = WorkerLink(theirs.detach())
        serving = asyncio.create_task(desk.serve(ServerLink(ours)))
        try:
            yield link
        finally:
            link._socket.close()
            await serving

    async def ask(self, link: WorkerLink, message: Any) -> Any:
        link.send(message)
        return await asyncio.to_thread(link.recv, 5.0)

    async def answer(self, link: WorkerLink, pass_: Pass, seconds: float = 0.01) -> None:
        for op in pass_.ops:
            if op.final and not op.replay:
                facts = {"tokens": 10, "size_bytes": 5}
                link.send(Done(op.op_id, ANSWERS.get(op.kind, b""), facts))
        link.send(PassOver(pass_.pass_id, 10, 1, seconds))

    def rows(self, table: type[tables.Base]) -> list[Any]:
        with self.database.read() as session:
            return list(session.scalars(select(table)))


def run_row(run: str = RUN, org: str = "org") -> tables.Run:
    return rows.run_row(org, NOW, run)


def create(run: str = RUN, org: str = "org") -> NewOperation:
    spec = RunSpec(run, "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)
    return NewOperation(org, "s", run, 0, "create", "m", 1, plan=Create(spec, "interactive"))


def train(seq: int, kind: str = "forward_backward", body: bytes = b"body", plan: Plan = BODY_ONLY) -> NewOperation:
    return NewOperation("org", "s", RUN, seq, kind, "m", 10, body, plan)


def save(seq: int, name: str) -> NewOperation:
    return NewOperation("org", "s", RUN, seq, "save_state", "m", 1, plan=Save("weights", name))


def sample(seq: int) -> NewOperation:
    return NewOperation("org", "s", "s:sample:0", seq, "sample", "m", 20, b"{}", Sample(2, 0, "interactive"))


def organisation(service: Service) -> None:
    def write(session: Any) -> None:
        session.add(tables.Organisation(id="org", name="org", created_at=NOW))
        session.flush()
        session.add(rows.session_row("org", NOW))
        session.flush()
        session.add(
            tables.Sampler(
                id="s:sample:0", org_id="org", session_id="s", sampling_session_seq_id=0, base_model="m",
                adapter_ref="weights/a", run_id=RUN, kind="snapshot", created_at=NOW,
            )
        )  # fmt: skip

    service.database.write_now(write)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    service = Service(tmp_path)
    organisation(service)
    service.database.close()
    return tmp_path


def go(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def outcome(service: Service, request_id: str) -> Outcome:
    found = await service.journal.outcome("org", request_id, 5)
    assert isinstance(found, Outcome)
    return found


async def first_pass(service: Service, link: WorkerLink) -> Pass:
    """Create the run and answer it."""
    await service.journal.accept(create(), run_row())
    pass_ = await service.ask(link, PullPass(["m"]))
    await service.answer(link, pass_)
    return pass_


def ops(pass_: Pass) -> list[tuple[int, bool]]:
    return [(op.seq, op.replay) for op in pass_.ops]


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
