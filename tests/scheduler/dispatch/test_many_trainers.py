"""Several trainers at one desk: where runs go, how they move, and what a trainer's death means for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.links.messages import Done, Drain, HandedOver, InLoss, Leaving, Pass, PassOver, PullPass, Snapshot
from scheduler.order.homes import HALF_LIFE_S, LOOK_S
from scheduler.order.operations import NewOperation
from store import tables
from tests.scheduler.dispatch.link import Link
from tests.scheduler.journal.kit import Service, create, go, outcome, run_row, train
from tests.scheduler.journal.test_losses import rows_of

RUNS = [f"s:train:{n}" for n in range(4)]


class Trainer(Link):
    """Answers passes as a trainer does; its runs are those that it was sent and has not given up."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: set[str] = set()
        self.keeps: set[str] = set()  # runs that it cannot save
        self.passes: list[Pass] = []

    def pull(self) -> None:
        self.say(PullPass(["m"], 1 << 30))

    async def next(self) -> Pass:
        pass_ = await asyncio.wait_for(self._sent.get(), 5)
        assert isinstance(pass_, Pass)
        self.runs -= {*pass_.release, *pass_.hand_over} - self.keeps
        for op in pass_.ops:
            assert op.kind == "create" or op.run_id in self.runs, f"{op.run_id} is not here"
            self.runs.add(op.run_id)
        self.passes.append(pass_)
        return pass_

    def answer(self, pass_: Pass) -> None:
        for run_id in pass_.hand_over:
            if run_id not in self.keeps:
                self.say(Snapshot(run_id, 0, f"runs/{run_id}/state-0"))
            self.say(HandedOver(run_id, run_id in self.keeps))
        for op in pass_.ops:
            if op.final and not op.replay:
                self.say(Done(op.op_id, b"result", {"tokens": 10}))
        self.say(PassOver(pass_.pass_id, 10, 1, 0.01))

    async def work(self) -> None:
        """Answer whatever comes, for ever."""
        while True:
            self.pull()
            self.answer(await self.next())

    @property
    def did(self) -> list[tuple[str, int, bool]]:
        return [(op.run_id, op.seq, op.replay) for pass_ in self.passes for op in pass_.ops]


class Hall(Service):
    """A service whose desk has a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now = 0.0
        self.journal.desks.remove(self.trainer)
        self.trainer = TrainerDesk(self.journal.training, 100, 0.0, lambda: self.now)

    @asynccontextmanager
    async def attach(self, *, works: bool = False) -> AsyncIterator[Trainer]:
        """Attach a trainer; leaving the context is its death."""
        trainer = Trainer()
        serving = asyncio.create_task(self.trainer.serve(trainer))
        working = asyncio.create_task(trainer.work()) if works else None
        try:
            yield trainer
        finally:
            if working is not None:
                working.cancel()
            trainer.close()
            await serving

    async def make(self) -> None:
        for run in RUNS:
            await self.journal.accept(create(run), run_row(run) if run == RUNS[0] else rows_of(run))

    async def trained(self, seq: int, runs: list[str] = RUNS) -> None:
        found = [await self.journal.accept(of(run, seq)) for run in runs]
        assert [(await outcome(self, op)).payload for op in found] == [b"result"] * len(runs)

    @property
    def attempts(self) -> list[int]:
        return [row.attempts for row in self.rows(tables.Operation)]


def of(run: str, seq: int) -> NewOperation:
    return replace(train(seq), lane=run, tokens=60)


def test_runs_are_shared_out_and_stay_and_passes_are_in_flight_at_once(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach() as one, hall.attach() as two:
            one.pull()
            two.pull()
            await asyncio.sleep(0)
            await hall.make()
            first, second = await one.next(), await two.next()
            assert {first.pass_id, second.pass_id} == {1, 2}  # neither has answered
            for trainer, pass_ in ((one, first), (two, second)):
                trainer.answer(pass_)
                trainer.pull()
            for trainer in (one, two):
                trainer.answer(await trainer.next())
            assert (len(one.runs), len(two.runs)) == (2, 2)
            assert not one.runs & two.runs
            await hall.journal.flush()
            report = hall.trainer.report()
            assert [part["runs"] for part in report["replicas"].values()] == [2]  # both of one name
            for trainer in (one, two):
                trainer.pull()
            for run in RUNS:
                await hall.journal.accept(of(run, 1))
            for trainer in (one, two):
                trainer.answer(await trainer.next())

    go(scenario())


def test_one_that_joins_gets_its_share_and_what_moves_goes_on_from_its_snapshot(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach(works=True) as one:
            await hall.make()
            for seq in range(1, 10):
                await hall.trained(seq)
            hall.now += HALF_LIFE_S / 10
            async with hall.attach(works=True) as two:
                for seq in range(10, 14):
                    await hall.trained(seq)
                    hall.now += LOOK_S
                assert (len(one.runs), len(two.runs)) == (2, 2)
                assert hall.trainer.report()["moves"] == 2
                moved = sorted(two.runs)
                for run in moved:
                    first = next(did for did in two.did if did[0] == run)
                    assert first == (run, 0, True)  # the snapshot
                    (last,) = [pass_ for pass_ in one.passes if run in pass_.hand_over]
                    after = one.passes[one.passes.index(last) :]
                    assert run not in {op.run_id for pass_ in after for op in pass_.ops}
            await hall.trained(14)  # two is gone
            assert set(RUNS) == one.runs
        assert not any(hall.attempts)

    go(scenario())


def test_the_death_of_one_suspects_and_rebuilds_its_runs_only(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach(works=True) as one:
            async with hall.attach() as two:
                two.pull()
                await asyncio.sleep(0)
                await hall.make()
                two.answer(await two.next())
                await hall.journal.flush()
                ops = {run: await hall.journal.accept(replace(of(run, 1), tokens=10)) for run in RUNS}
                two.pull()
                held = {op.op_id for op in (await two.next()).ops}
                assert len(held) > 1
                two.say(InLoss(next(iter(held)), 3, 1000.0))
                before = list(one.did)
                lost = set(two.runs)
                assert lost
            for op in ops.values():
                assert (await outcome(hall, op)).payload == b"result"
            assert {run for run, _, _ in one.did[len(before) :] if run in lost} == lost
            assert not [did for did in one.did if did[2] and did[0] not in lost]
            assert {row.id for row in hall.rows(tables.Operation) if row.attempts} == held  # its loss had time left
        assert hall.trainer.stats["lost"] == 2

    go(scenario())


@pytest.mark.parametrize("how", ["it says so", "it is told to", "it dies over it"])
def test_one_that_leaves_is_not_suspected_and_gets_nothing_more(folder: Path, how: str) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach() as one:
            one.pull()
            await asyncio.sleep(0)
            await hall.make()
            one.answer(await one.next())
            one.pull()
            await hall.journal.flush()
            if how == "it is told to":
                hall.trainer.drain()
                assert isinstance(await asyncio.wait_for(one._sent.get(), 5), Drain)
                one.say(Leaving())
                op = await hall.journal.accept(of(RUNS[0], 1))
                await asyncio.sleep(0.05)
                assert one._sent.empty()
            else:
                op = await hall.journal.accept(of(RUNS[0], 1))
                await one.next()  # a pass that it may no longer see
                hall.trainer.drain()
                if how == "it says so":
                    one.say(Leaving())
        async with hall.attach(works=True):
            assert any(hall.attempts) == (how == "it dies over it")
            assert (await outcome(hall, op)).payload == b"result"

    go(scenario())


def test_one_that_leaves_is_no_place_for_new_runs_while_it_is_still_there(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach() as one, hall.attach() as two:
            one.pull()
            two.pull()
            one.say(Leaving())
            await asyncio.sleep(0)
            await hall.make()
            two.answer(await two.next())
            while two.runs != set(RUNS):
                two.pull()
                two.answer(await two.next())

    go(scenario())


def test_of_runs_without_a_trainer_one_that_has_work_waits_for_none_that_has_not(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with AsyncExitStack() as living:
            await living.enter_async_context(hall.attach(works=True))
            async with hall.attach(works=True) as two:
                await hall.make()
                await hall.trained(1)
                lost = sorted(two.runs)
                await living.enter_async_context(hall.attach(works=True))
            assert len(lost) == 2
            for run in lost:  # the other has nothing to do, and is on no trainer
                await hall.trained(2, [run])

    go(scenario())


def test_a_run_that_is_over_is_forgotten_by_the_trainer_that_has_it(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach() as one, hall.attach() as two:
            one.pull()
            two.pull()
            await asyncio.sleep(0)
            await hall.make()
            while len(one.runs | two.runs) < len(RUNS):
                for trainer in (one, two):
                    trainer.answer(await trainer.next())
                    trainer.pull()
            await hall.journal.flush()
            has, other = (one, two) if RUNS[0] in one.runs else (two, one)
            hall.journal.training.close_run(RUNS[0])
            hall.trainer.wake()
            assert (await has.next()).release == [RUNS[0]]
            assert other._sent.empty()

    go(scenario())


def test_a_large_operation_has_more_time_in_proportion(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        hall.journal.desks.remove(hall.trainer)
        hall.trainer = TrainerDesk(hall.journal.training, 100, 2.0)
        async with hall.attach() as one:
            one.pull()
            await asyncio.sleep(0)
            await hall.journal.accept(create(RUNS[0]), run_row(RUNS[0]))
            one.answer(await one.next())
            for seq, tokens, limit_s in ((1, 60, 2.0), (2, 250, 5.0)):
                one.pull()
                await hall.journal.accept(replace(of(RUNS[0], seq), tokens=tokens))
                pass_ = await one.next()
                assert pass_.limit_s == limit_s
                one.answer(pass_)

    go(scenario())


def test_a_run_that_is_to_move_moves_though_there_is_no_other_trainer_any_more(folder: Path) -> None:
    """The trainer that has it forgets it with its next pass, so nothing of the run may be in that pass."""

    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach() as one:
            one.pull()
            await asyncio.sleep(0)
            await hall.make()
            one.answer(await one.next())
            for seq in range(1, 10):
                ops = [await hall.journal.accept(of(run, seq)) for run in RUNS]
                hall.now += LOOK_S
                for _ in RUNS:  # one operation fits a pass
                    one.pull()
                    one.answer(await one.next())
                assert [(await outcome(hall, op)).payload for op in ops] == [b"result"] * len(RUNS)
            ops = [await hall.journal.accept(of(run, 10)) for run in RUNS]
            hall.now += LOOK_S
            one.pull()
            held = await one.next()
            async with hall.attach() as two:
                two.pull()
                await asyncio.sleep(0.05)
            one.answer(held)
            working = asyncio.create_task(one.work())
            assert [(await outcome(hall, op)).payload for op in ops] == [b"result"] * len(RUNS)
            assert hall.trainer.report()["moves"]
            working.cancel()

    go(scenario())


def test_a_run_that_cannot_be_saved_stays_and_all_survive_both_their_trainers(folder: Path) -> None:
    async def scenario() -> None:
        hall = Hall(folder)
        async with hall.attach(works=True) as one:
            one.keeps = set(RUNS[:2])
            await hall.make()
            for seq in range(1, 10):
                await hall.trained(seq)
            async with hall.attach(works=True) as two:
                for seq in range(10, 14):
                    await hall.trained(seq)
                    hall.now += LOOK_S
                assert two.runs == set(RUNS) - one.keeps  # if one stays, another goes
                assert hall.trainer.report()["moves"] == 2
        async with hall.attach(works=True) as three:
            await hall.trained(14)
            assert three.runs == set(RUNS)

    go(scenario())
