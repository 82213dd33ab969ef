"""Nothing applied is ever answered as failed, and a run that is not what it was says so: full disks, missing files,
trainers that die again and again. A real database, real blobs and real links; the test plays the trainer."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from scheduler.journal import setbacks, storing
from scheduler.journal.recovery import recover
from scheduler.links.contract import LIVES
from scheduler.links.messages import Done, Pass, PassOver, PullPass, SetAside, Snapshot
from scheduler.links.sockets import ServerLink, WorkerLink
from scheduler.order.operations import Gone, Outcome, Waiting
from scheduler.order.plans import ForwardBackward, Slice
from store import tables
from store.blobs.folder import FolderBlobs
from store.blobs.room import NoRoom, Room
from store.database.db import Database
from tests.scheduler.journal.kit import RESULT, RUN, Service, create, first_pass, go, ops, outcome, run_row, save, train
from tests.waiting import until_async

LARGE = ForwardBackward(tuple(Slice(n, n + 1, 10) for n in range(10)))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "AGAIN_S", (0.02, 0.05))
    monkeypatch.setattr(setbacks, "RESUME_S", (0.02, 0.05))


class Disk:
    """A disk that does not take some refs while it is `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refs: str, number: int = errno.ENOSPC) -> None:
        self.full, self.refused = True, 0
        put = FolderBlobs.put

        def maybe(blobs: FolderBlobs, ref: str, data: bytes) -> None:
            if self.full and ref.startswith(refs):
                self.refused += 1
                raise OSError(number, os.strerror(number))
            put(blobs, ref, data)

        monkeypatch.setattr(FolderBlobs, "put", maybe)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_result_that_cannot_be_stored_is_stored_later(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one, two = [await service.journal.accept(train(seq)) for seq in (1, 2)]
            disk = Disk(monkeypatch, "results/", number)
            pass_ = await service.ask(link, PullPass(["m"]))
            for op in pass_.ops:
                link.send(Done(op.op_id, RESULT, {"tokens": 10}))
            await until_async(lambda: disk.refused >= 6)
            waiting = await service.journal.outcome("org", one, 0.05)
            assert isinstance(waiting, Waiting)
            assert "it is tried again until it can be stored" in waiting.reason
            with pytest.raises(NoRoom, match="nothing new is accepted until there is room; results can be had"):
                await service.journal.accept(train(3))
            disk.full = False
            for request_id in (one, two):
                assert (await outcome(service, request_id)).payload == RESULT
            assert len(service.rows(tables.UsageEvent)) == 2

    go(scenario())


def test_a_body_that_cannot_be_stored_leaves_its_number_free(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        clock = [0.0]
        service = Service(folder, room=Room(folder / "blobs", clock=lambda: clock[0]))
        await service.journal.accept(create(), run_row())
        disk = Disk(monkeypatch, "ops/")
        with pytest.raises(NoRoom, match=r"the server's disk is full \(No space left on device\)"):
            await service.journal.accept(train(1))
        disk.full = False
        with pytest.raises(NoRoom):  # until the disk has been looked at again
            await service.journal.accept(train(1))
        clock[0] += 2.0
        request_id = await service.journal.accept(train(1))
        assert [row.id for row in service.rows(tables.Operation) if row.seq == 1] == [request_id]

    go(scenario())


def test_a_disk_that_is_nearly_full_takes_no_new_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    room = Room(tmp_path, least_free_bytes=1 << 60, clock=lambda: clock[0])
    for _ in range(3):
        clock[0] += 2.0
        with pytest.raises(NoRoom, match="nearly full"):
            room.check()
    assert len(caplog.records) == 1  # the operator is told once
    assert "nearly full" in caplog.text
    Room(tmp_path, least_free_bytes=1).check()
    with pytest.raises(NoRoom, match="does not answer"):
        Room(tmp_path / "gone").check()


def test_what_is_left_behind_when_the_database_fails_is_taken_up_by_the_repeat(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit succeeded, but nobody was told: the client asks again and gets its answer."""
    monkeypatch.setattr("scheduler.journal.accepting.acceptance.INSERT_AGAIN_S", ())

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            write = Database.write_batched

            async def unheard(self: Database, batch: Any, item: Any, *, lock: str) -> Any:
                await write(self, batch, item, lock=lock)
                raise OperationalError("COMMIT", {}, Exception("connection lost"))

            with monkeypatch.context() as broken:
                broken.setattr(Database, "write_batched", unheard)
                with pytest.raises(NoRoom, match="database does not answer"):
                    await service.journal.accept(train(1))
            again = await service.journal.accept(train(1))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert (await outcome(service, again)).payload == RESULT
            assert len([row for row in service.rows(tables.Operation) if row.seq == 1]) == 1

    go(scenario())


def test_what_is_settled_out_of_order_is_replayed_in_order(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result of 1 finds no room, that of 2 does; then everything dies."""

    async def before() -> None:
        service = Service(folder)
        ours, theirs = socket.socketpair()
        link = WorkerLink(theirs.detach())
        serving = asyncio.create_task(service.trainer.serve(ServerLink(ours)))
        await first_pass(service, link)
        one, two = [await service.journal.accept(train(seq)) for seq in (1, 2)]
        disk = Disk(monkeypatch, f"results/{one[:2]}/{one}")
        for op in (await service.ask(link, PullPass(["m"]))).ops:
            link.send(Done(op.op_id, RESULT, {"tokens": 10}))
        await outcome(service, two)
        assert disk.refused
        serving.cancel()

    async def after() -> None:
        monkeypatch.undo()
        service = Service(folder)
        recover(service.journal, service.database)
        async with service.worker(service.trainer) as link:
            assert ops(await service.ask(link, PullPass(["m"]))) == [(0, True), (1, False), (2, True)]

    go(before())
    go(after())


def test_a_trainer_lost_while_one_of_two_is_settled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one, two, three = [await service.journal.accept(train(seq)) for seq in (1, 2, 3)]
            disk = Disk(monkeypatch, f"results/{one[:2]}/{one}")
            for op in (await service.ask(link, PullPass(["m"]))).ops[:2]:
                link.send(Done(op.op_id, RESULT, {"tokens": 10}))
            await outcome(service, two)
            asyncio.get_running_loop().call_later(0.1, setattr, disk, "full", False)
        async with service.worker(service.trainer) as link:
            again = await service.ask(link, PullPass(["m"]))
            assert ops(again) == [(0, True), (1, True), (2, True)]
            await service.answer(link, again)
            last = await service.ask(link, PullPass(["m"]))  # alone: a trainer was lost over it
            assert ops(last) == [(3, False)]
            await service.answer(link, last)
            for request_id in (one, two, three):
                assert (await outcome(service, request_id)).payload == RESULT

    go(scenario())


# ---- runs that are not what they were


def broken_words(found: Outcome) -> str:
    assert found.category == "server"
    assert found.error is not None
    return found.error


def test_a_run_that_cannot_be_rebuilt_says_so_and_what_is_left(folder: Path) -> None:
    async def scenario() -> str:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            for new in (train(1), save(2, "best")):
                request_id = await service.journal.accept(new)
                await service.answer(link, await service.ask(link, PullPass(["m"])))
                await outcome(service, request_id)
        doomed, behind = [await service.journal.accept(train(seq)) for seq in (3, 4)]
        async with service.worker(service.trainer) as link:
            pass_ = await service.ask(link, PullPass(["m"]))
            link.send(SetAside(RUN, "operation 1 (forward_backward) cannot be repeated: damaged", lasting=True))
            link.send(PassOver(pass_.pass_id, 0, 0, 0.0))
            link.send(PullPass(["m"]))
            words = broken_words(await outcome(service, doomed))
            assert broken_words(await outcome(service, behind)) == words
            later = await service.journal.accept(train(5))
            assert broken_words(await outcome(service, later)) == words
            released: Pass = await asyncio.to_thread(link.recv, 5.0)
            assert (released.ops, released.release) == ([], [RUN])
        await service.journal.flush()
        assert len(service.rows(tables.UsageEvent)) == 1
        service.database.close()
        return words

    async def after() -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        later = await service.journal.accept(train(6))
        assert broken_words(await outcome(service, later)) == words[0]

    words: list[str] = []

    async def first() -> None:
        words.append(await scenario())

    go(first())
    assert f"run {RUN} cannot be rebuilt as it was" in words[0]
    assert "operation 1 (forward_backward) cannot be repeated: damaged" in words[0]
    assert f"tinker://{RUN}/weights/best" in words[0]
    go(after())


@pytest.mark.parametrize("what", ["body", "snapshot"])
def test_what_is_missing_is_named_at_the_start(folder: Path, what: str) -> None:
    async def before() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one = await service.journal.accept(train(1))
            pass_ = await service.ask(link, PullPass(["m"]))
            await service.answer(link, pass_)
            await outcome(service, one)
            if what == "snapshot":
                with service.blobs.new_folder(f"runs/{RUN}/state-1") as made:
                    (made / "x").write_bytes(b"x")
                link.send(Snapshot(RUN, 1, f"runs/{RUN}/state-1"))
                await until_async(lambda: service.rows(tables.Run)[0].snapshot_seq is not None)
        service.database.close()
        FolderBlobs(folder / "blobs").delete_tree(pass_.ops[0].body_ref if what == "body" else f"runs/{RUN}/state-1")

    async def after() -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        words = broken_words(await outcome(service, await service.journal.accept(train(2))))
        missing = "the body of operation 1 (forward_backward)" if what == "body" else "its snapshot after operation 1"
        assert f"{missing} is missing. It has no checkpoint: start it again" in words

    go(before())
    go(after())


def test_a_disk_that_does_not_answer_holds_up_one_run_for_a_while(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one, two = [await service.journal.accept(train(seq)) for seq in (1, 2)]
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(1, False), (2, False)]
            link.send(Done(one, RESULT, {"tokens": 10}))
            link.send(SetAside(RUN, "operation 2: OSError, Input/output error", kept=True))
            link.send(PassOver(pass_.pass_id, 10, 1, 0.01))
            again = await service.ask(link, PullPass(["m"]))
            assert ops(again) == [(2, False)]  # the trainer still has the run
            link.send(SetAside(RUN, "the disk is away"))
            again = await service.ask(link, PullPass(["m"]))
            assert ops(again) == [(0, True), (1, True), (2, False)]
            await service.answer(link, again)
            assert (await outcome(service, two)).payload == RESULT

    go(scenario())


def test_an_answer_on_its_way_is_not_computed_twice_on_a_run_that_is_held(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one, _ = [await service.journal.accept(train(seq)) for seq in (1, 2)]
            disk = Disk(monkeypatch, "results/")
            await service.ask(link, PullPass(["m"]))
            link.send(Done(one, RESULT, {"tokens": 10}))
            link.send(SetAside(RUN, "operation 2: OSError", kept=True))
            link.send(PullPass(["m"]))
            await asyncio.sleep(0.2)
            assert await asyncio.to_thread(link.recv, 0.0) is None
            disk.full = False
            assert ops(await asyncio.to_thread(link.recv, 5.0)) == [(2, False)]

    go(scenario())


# ---- trainers that do not live long


async def next_pass(link: WorkerLink) -> Pass:
    link.send(PullPass(["m"]))
    found: Pass = await asyncio.to_thread(link.recv, 5.0)
    return found


def test_a_large_operation_is_not_given_up_while_it_gets_on(folder: Path) -> None:
    """A trainer lives for two slices, ten times; what it has done is in a snapshot."""

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
        large = await service.journal.accept(train(1, plan=LARGE))
        done = 0
        for life in range(12):
            async with service.worker(service.trainer) as link:
                for _ in range(3):
                    pass_ = await next_pass(link)
                    slices = [op for op in pass_.ops if op.op_id == large]
                    if slices:
                        assert slices[0].start == done, "what was done is not asked for again"
                        done = slices[-1].stop
                        with service.blobs.new_folder(f"runs/{RUN}/state-0.{life}") as made:
                            (made / "x").write_bytes(b"x")
                        link.send(Snapshot(RUN, 0, f"runs/{RUN}/state-0.{life}", large, done))
                    if slices and slices[-1].final:
                        link.send(Done(large, RESULT, {"tokens": 100}))
                        assert (await outcome(service, large)).payload == RESULT
                        return
                    if slices:
                        await next_pass(link)  # and dies over the next slice
                        break
        raise AssertionError("it never came to its end")

    go(scenario())


def test_an_operation_that_gets_no_further_is_given_up(folder: Path) -> None:
    """The fifth slice kills every trainer."""

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
        killer = await service.journal.accept(train(1, plan=LARGE))
        deaths = 0
        while isinstance(await service.journal.outcome("org", killer, 0.3), Waiting):
            async with service.worker(service.trainer) as link:
                pass_ = await next_pass(link)
                while not any(op.op_id == killer and op.stop > 4 for op in pass_.ops):
                    pass_ = await next_pass(link)
            deaths += 1
            assert deaths <= LIVES + 5
        assert "stopped 3 times" in str((await outcome(service, killer)).error)

    go(scenario())


def test_a_run_over_whose_replay_trainers_die_waits_and_others_go_on(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        other = "s:train:1"
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            await service.journal.accept(create(other), rows_of(other))
            await service.answer(link, await next_pass(link))
            one = await service.journal.accept(train(1))
            await service.answer(link, await next_pass(link))
            await outcome(service, one)
        pending = await service.journal.accept(train(2))
        for _ in range(2 * LIVES):
            async with service.worker(service.trainer) as link:
                while not any(op.replay and op.run_id == RUN and op.seq == 1 for op in (await next_pass(link)).ops):
                    pass
        waiting = await service.journal.outcome("org", pending, 0.0)
        assert isinstance(waiting, Waiting)  # never answered as failed
        async with service.worker(service.trainer) as link:
            for _ in range(4):
                await service.answer(link, await next_pass(link))
                if isinstance(await service.journal.outcome("org", pending, 0.2), Outcome):
                    break
            assert (await outcome(service, pending)).payload == RESULT

    go(scenario())


def rows_of(run_id: str) -> tables.Run:
    row = run_row(run_id)
    row.model_seq_id = 1
    return row


def test_a_damaged_result_is_given_to_nobody(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one = await service.journal.accept(train(1))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, one)
        service.journal.answers.clear()
        file = service.blobs.path(f"results/{one[:2]}/{one}")
        file.write_bytes(file.read_bytes()[:20])
        found = await service.journal.outcome("org", one, 1.0)
        assert isinstance(found, Gone)
        assert "damaged" in found.why

    go(scenario())


def test_stopping_does_not_wait_for_ever_for_a_full_disk(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            one = await service.journal.accept(train(1))
            Disk(monkeypatch, "results/")
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await asyncio.sleep(0.1)
            await service.journal.stop(0.1)
        assert [row.state for row in service.rows(tables.Operation) if row.id == one] == ["queued"]

    go(scenario())
