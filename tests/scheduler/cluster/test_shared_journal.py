"""Two replicas in one process, on one PostgreSQL and one Redis; the tests play the workers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError, NoResultFound, OperationalError
from weft.wire.binary.sample_codec import SequenceResult, decode_sample_response, encode_sample_response

from api.state.fetched import Fetched
from api.state.rates import check_in_flight
from api.who.principal import Principal, RateLimit
from billing.prices import load_prices
from scheduler.cluster import cancels, election, policy_desk, shared_journal, shared_limits, term
from scheduler.cluster.answers import SampleAnswers
from scheduler.cluster.election import Leadership
from scheduler.cluster.shared_journal import SharedJournal
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.cluster.stored import StoredOperations
from scheduler.cluster.term import Shared, Term
from scheduler.journal.accepting.acceptance import Taking
from scheduler.journal.ending.results import FETCHED_LAST, Results
from scheduler.journal.rows import SMALL_BYTES, from_row, pack as pack_op
from scheduler.journal.samples.samplers import SamplerFacts
from scheduler.links import loading, redis_queue
from scheduler.links.broadcasts import Accepted, Broadcasts, Ended, Listener
from scheduler.links.contract import Answered, Item, QueueUnreachable
from scheduler.links.large_results import INLINE_BYTES, pack
from scheduler.links.loading import Loading, LoadingBoard, announced
from scheduler.links.messages import Done, Pass, PassOver, PolicyMoved, PullPass, PullSamples, SampleWork, SetAside
from scheduler.links.policies import PolicyBoard
from scheduler.links.redis_queue import BATCH, RedisQueue
from scheduler.links.sample_link import SampleLink
from scheduler.links.train_link import TrainerLink
from scheduler.order import presence
from scheduler.order.operations import (
    Draining,
    Gone,
    NewOperation,
    Outcome,
    QueueFull,
    RunClosed,
    SequenceReused,
    Waiting,
)
from scheduler.order.plans import NewSampler, Sample
from store import tables
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.jobs.proxy import Proxy, proxy
from tests.scheduler.journal.test_journal import RUN, create, organisation, run_row, train
from tests.servers import redis_server

MOST_OPS, MOST_BYTES = 100, 10_000
NOW_LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A database of the Redis that these tests may empty."""
    with redis_server() as own:
        yield own


class Replica:
    def __init__(self, name: str, database: Database, blobs: FolderBlobs, url: str) -> None:
        self.threads = ThreadPoolExecutor(12)
        self.broadcasts, self.queue, self.board = Broadcasts(url), RedisQueue(url), BacklogBoard(url)
        self.loads = LoadingBoard(url)
        self.journal = SharedJournal(
            database,
            blobs,
            load_prices(),
            MOST_OPS,
            MOST_BYTES,
            name=name,
            queue=self.queue,
            broadcasts=self.broadcasts,
            board=self.board,
            loads=self.loads,
            threads=self.threads,
            waiting_of=lambda op_id: None,
        )
        self.answers = SampleAnswers(self.journal, self.queue, blobs, name)
        parts = (database, blobs, load_prices(), self.queue, self.broadcasts, self.threads, self.journal)
        self.leadership = Leadership(Shared(url, *parts, pass_tokens=100))
        loop = asyncio.get_running_loop()
        self.listener = Listener.of_ends(
            url,
            lambda ends, stamp: loop.call_soon_threadsafe(self.journal.heard, ends, stamp) and None,
            lambda: loop.call_soon_threadsafe(self.journal.missed) and None,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.listener.start()
        await asyncio.to_thread(self.listener.connected.wait, 10)
        works = (self.answers.settle, self.journal.look_after, self.journal.exchange_backlogs)
        tasks = [asyncio.create_task(work()) for work in works]
        try:
            yield
        finally:
            await self.leadership.stop(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.journal.flush()
            self.listener.stop()

    def ended(self) -> None:
        self.listener.join()
        self.threads.shutdown()

    async def lead(self) -> None:
        self.leadership.start()
        await until(lambda: self.leadership.term is not None)

    async def result(self, request_id: str, within_s: float = 30) -> Any:
        found = await self.journal.outcome("org", request_id, within_s)
        return self.journal.answers.whole(found) if isinstance(found, Outcome) else found


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


Play = Callable[[Callable[[Replica, Replica], Awaitable[None]]], None]


@pytest.fixture
def play(postgres_database: Database, blobs: FolderBlobs, url: str, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scenario between two replicas, of which neither leads yet."""
    redis.Redis.from_url(url).flushall()
    organisation(SimpleNamespace(database=postgres_database))  # type: ignore[arg-type]
    monkeypatch.setattr(term, "RESCAN_S", 0.2)
    for module in (term, election):
        monkeypatch.setattr(module, "BEAT_S", 0.2)
    monkeypatch.setattr(tables, "LEADS_S", 2.0)
    monkeypatch.setattr(shared_journal, "EXCHANGE_S", 0.1)

    def end(replicas: list[Replica]) -> None:
        """Stop everybody who waits in Redis for what will not come: each would wait for a second."""
        with redis.Redis.from_url(url) as client:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)
        for replica in replicas:
            replica.ended()

    def run(scenario: Callable[[Replica, Replica], Awaitable[None]]) -> None:
        async def both() -> None:
            async with AsyncExitStack() as stack:
                replicas = [Replica(name, postgres_database, blobs, url) for name in ("one", "two")]
                stack.callback(end, replicas)
                for replica in replicas:
                    await stack.enter_async_context(replica.running())
                await scenario(*replicas)

        asyncio.run(asyncio.wait_for(both(), 60))

    return run


def sample(seq: int, body: bytes = b"{}") -> NewOperation:
    plan = Sample(2, 5, "interactive")
    return NewOperation("org", "s", "s:sample:0", seq, "sample", "m", 20, body, plan)


@pytest.fixture
def board(url: str) -> Iterator[PolicyBoard]:
    made = PolicyBoard(url)
    yield made
    made.close()


#: An answer whose logprobs are recorded.
RECORDED = encode_sample_response([SequenceResult(np.array([7], np.int32), np.array([-1], np.float32), "stop")])


@asynccontextmanager
async def generator(url: str, blobs: FolderBlobs, payloads: Iterable[bytes] = ()) -> AsyncIterator[list[str]]:
    """Answers every sample, the first ones with `payloads`; returns the ids of those it got."""
    answers = chain(payloads, repeat(b"tokens"))
    got: list[str] = []
    link = await asyncio.to_thread(SampleLink, url, blobs)
    over = False

    def serve() -> None:
        link.send(PullSamples(["m"], 2))
        while not over:
            work = link.recv(0.05)
            if isinstance(work, SampleWork):
                for op in work.ops:
                    got.append(op.op_id)
                    payload, facts = next(answers), {"prefill": 5, "sample": 4}
                    link.send(Done(op.op_id, payload, facts, recorded=payload == RECORDED))
                link.send(PullSamples(["m"], 2))

    serving = asyncio.create_task(asyncio.to_thread(serve))
    try:
        yield got
    finally:
        over = True
        await serving
        link.close()


@asynccontextmanager
async def trainer(url: str, blobs: FolderBlobs) -> AsyncIterator[list[tuple[int, bool]]]:
    """Answers every pass; returns (seq, replay) of all operations it was given, (-1, False) once its leader was
    gone."""
    given: list[tuple[int, bool]] = []
    over = False

    def serve() -> None:
        while not over:
            steps = 0
            try:
                link = TrainerLink(url, blobs, lambda: over)
            except EOFError:
                return
            try:
                while not over:
                    link.send(PullPass(["m"]))
                    message = None
                    while message is None and not over:
                        message = link.recv(0.05)
                    if isinstance(message, Pass):
                        for op in message.ops:
                            given.append((op.seq, op.replay))
                            steps += op.kind == "optim_step"
                            facts = {"tokens": 10} if op.kind == "forward_backward" else {"version": steps}
                            if op.final and not op.replay:
                                link.send(Done(op.op_id, b"result", facts))
                        link.send(PassOver(message.pass_id, 10, 1, 0.01))
            except EOFError:
                given.append((-1, False))
            finally:
                link.close()

    serving = asyncio.create_task(asyncio.to_thread(serve))
    try:
        yield given
    finally:
        over = True
        await serving


def count(database: Database, table: type[tables.Base]) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_one_operation_sent_to_both_replicas_at_once_is_one(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        async with generator(url, blobs) as got:
            for seq in range(5):
                ids = await asyncio.gather(*(r.journal.accept(sample(seq)) for r in (one, two, one, two)))
                assert len(set(ids)) == 1
                outcomes = await asyncio.gather(one.result(ids[0]), two.result(ids[0]))
                assert [outcome.payload for outcome in outcomes] == [b"tokens"] * 2
            assert len(got) == len(set(got)) == 5
        with pytest.raises(SequenceReused):
            await two.journal.accept(NewOperation("org", "s", "s:sample:0", 0, "sample", "m", 20, b"other"))
        assert not one.journal._open
        assert not two.journal._open

    play(scenario)
    assert count(postgres_database, tables.Operation) == 5


def test_a_repeat_is_the_operation_that_is_there_and_not_one_that_comes_too_late(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arrive here while another replica accepts the same operation, so one is inserted in vain. The other waited
    for that one, and failed with it."""

    async def scenario(one: Replica, two: Replica) -> None:
        first = await two.journal.accept(sample(0))
        acceptance = one.journal._admission._acceptance
        write = acceptance._write

        async def slowly(taking: Taking) -> None:
            await asyncio.sleep(1)
            await write(taking)

        monkeypatch.setattr(acceptance, "_write", slowly)
        asked = asyncio.create_task(acceptance.known(sample(0), maybe_stored=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(acceptance.take(sample(0), ()))
        assert await asked == first
        with pytest.raises(IntegrityError):
            await late

    play(scenario)


def test_a_result_that_was_fetched_goes_for_all_replicas(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    now = datetime.now(UTC)
    results = Results(postgres_database, blobs, 10**9, lambda: now + FETCHED_LAST + timedelta(minutes=1))

    async def scenario(one: Replica, two: Replica) -> None:
        async with generator(url, blobs):
            ids = [await one.journal.accept(sample(seq)) for seq in range(2)]
            for request_id in ids:
                assert (await two.result(request_id)).payload == b"tokens"
        fetched = Fetched(postgres_database, lambda: now)
        fetched.note(Principal("org", None), ids[:1])
        assert await fetched.flush() == 1
        assert await asyncio.to_thread(results.sweep) == 1
        for replica in (one, two):
            assert isinstance(await replica.result(ids[0]), Gone)
            assert (await replica.result(ids[1])).payload == b"tokens"

    play(scenario)


def test_what_any_replica_accepts_is_trained_in_order_by_the_one_that_leads(
    play: Play, url: str, blobs: FolderBlobs
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        ids = [await two.journal.accept(create(), run_row())]
        assert not await two.journal.cancel("org", ids[0])  # it is no sample
        refused = NewOperation("org", "s", RUN, 3, "forward_backward", "m", 10, b"bad", refused="too long")
        ids += [await two.journal.accept(train(2)), await one.journal.accept(train(1))]
        ids += [await one.journal.accept(train(4)), await two.journal.accept(refused)]
        async with trainer(url, blobs) as given:
            told = [await two.result(request_id) for request_id in ids]
            assert [outcome.error for outcome in told] == [None] * 4 + ["too long"]
            assert [await one.result(request_id) for request_id in ids] == told
        assert [seq for seq, _ in given] == [0, 1, 2, 4]

    play(scenario)


def test_the_leader_takes_what_it_hears_once_and_looks_up_what_it_does_not_know(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The carrier may report late, or again, what has ended long ago."""
    looked, heard = list[str](), list[Accepted]()
    rows, accepted = Term._rows, Broadcasts.accepted

    def look(self: Term, op_ids: list[str]) -> Any:
        looked.extend(op_ids)
        return rows(self, op_ids)

    def tell(self: Broadcasts, notes: Any) -> None:
        heard.extend(notes)
        accepted(self, notes)

    monkeypatch.setattr(Term, "_rows", look)
    monkeypatch.setattr(Broadcasts, "accepted", tell)
    monkeypatch.setattr(term, "RESCAN_S", 60)  # after the first look, which found nothing

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs) as given:
            ids = [await two.journal.accept(create(), run_row())]
            assert (await two.result(ids[0])).error is None
            looked.clear()
            ids += [await two.journal.accept(train(seq, body=b"{}")) for seq in (1, 2)]
            assert [(await two.result(request_id)).error for request_id in ids] == [None] * 3
            assert not set(ids) & set(looked)
            await asyncio.to_thread(accepted, two.broadcasts, [*heard, Accepted(ids[1]), Accepted(ids[2], packed=b"?")])
            ids.append(await two.journal.accept(train(3)))
            assert (await two.result(ids[3])).error is None
        assert {ids[1], ids[2]} <= set(looked)
        assert given == [(0, False), (1, False), (2, False), (3, False)]

    play(scenario)


def test_a_small_answer_to_what_was_accepted_here_is_not_looked_up_and_is_corrected_once(
    play: Play, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()
    rows = StoredOperations.all_queued

    def look(self: StoredOperations, op_ids: Any) -> Any:
        looked.extend(op_ids)
        return rows(self, op_ids)

    monkeypatch.setattr(StoredOperations, "all_queued", look)

    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(seq)) for seq in range(2)]
        await until(lambda: one.queue.known(ids) == set(ids))
        done = [Done(ids[0], b"tokens", {"prefill": 5, "sample": 4}), Done(ids[1], b"x" * 2000, {"sample": 4})]
        answers = [Answered(one_done.op_id, pack(one_done, blobs), 20, 1.0, "") for one_done in done]
        known = [one.journal.opened(request_id) for request_id in ids]
        settled = [await one.answers._queued(answers), await two.answers._queued(answers)]
        assert [found[ids[0]] is known[0] for found in settled] == [True, False]
        assert looked == [ids[1], *ids]
        looked.clear()
        packed = [dataclasses.replace(answer, op=pack_op(op)) for answer, op in zip(answers, known, strict=True)]  # type: ignore[arg-type]
        assert (await two.answers._queued(packed))[ids[0]].plan == known[0].plan  # type: ignore[union-attr]
        assert (await two.answers._queued([dataclasses.replace(packed[0], op=b"?")]))[ids[0]].id == ids[0]
        assert looked == [ids[1], ids[0]]
        ends = [await one.answers._settle(answers[0], found[ids[0]]) for found in settled]
        assert [(end.path, end.tokens) for end in ends if end is not None] == [(known[0].path, -11), ((), 0)]  # type: ignore[union-attr]
        assert (await two.result(ids[0])).payload == b"tokens"

    play(scenario)


@pytest.mark.parametrize("gone", [True, False])
def test_a_result_that_is_lost_or_damaged_on_its_way_is_sampled_again(
    play: Play, blobs: FolderBlobs, gone: bool
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        answer = pack(Done(request_id, b"x" * 2 * INLINE_BYTES, {"sample": 4}), blobs)
        (ref,) = blobs.listed("handoff/*")
        blobs.delete(ref) if gone else blobs.path(ref).write_bytes(b"not what was written")
        op = one.journal.opened(request_id)
        assert await one.answers._settle(Answered(request_id, answer, 20, 1.0, ""), op) is not None, "it is forgotten"
        await one.lead()
        async with generator(one.broadcasts.url, blobs) as got:
            assert (await two.result(request_id)).payload == b"tokens"
        assert got == [request_id]

    play(scenario)


@pytest.mark.parametrize("large", [b"L" * (SMALL_BYTES + 1), b"L" * (INLINE_BYTES + 1), RECORDED], ids=len)
def test_a_result_that_cannot_be_stored_holds_up_none_that_lies_in_its_row(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, large: bytes
) -> None:
    """The store for large results and recordings is away; where they were handed over, they can be read."""
    put, tried, there = blobs.put, list[str](), threading.Event()

    def away(ref: str, data: bytes) -> None:
        if ref.startswith(("results/", "stability/")) and not there.is_set():
            tried.append(ref)
            raise StoreAway("the server's object store does not answer (Unreachable)")
        put(ref, data)

    monkeypatch.setattr(blobs, "put", away)
    monkeypatch.setattr(redis_queue, "TAKEN_S", 0.2)  # both replicas try again and again

    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(seq)) for seq in range(6)]
        async with generator(url, blobs, [large, large]) as got:
            small = [await one.result(request_id) for request_id in ids[2:]]
            assert [outcome.payload for outcome in small] == [b"tokens"] * 4
            await until(lambda: one.queue.known(ids) == set(ids[:2]))
            await until(lambda: {ref.rpartition("/")[2].removesuffix(":0") for ref in tried} == set(ids[:2]))
            there.set()
            assert [(await one.result(request_id)).payload for request_id in ids[:2]] == [large] * 2
            await until(lambda: not one.queue.known(ids) and not blobs.listed("handoff/*"))
            assert got == ids

    play(scenario)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where an event loop asks the database: if that is frozen, the loop does nothing else, for any tenant."""
    found = list[str]()

    def noted(ask: Callable[[Database], Any]) -> Callable[[Database], Any]:
        def asking(self: Database) -> Any:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                found.append("".join(traceback.format_stack(limit=4)[:-1]))
            return ask(self)

        return asking

    for name in ("read", "ask"):
        monkeypatch.setattr(Database, name, noted(getattr(Database, name)))
    return found


def test_no_replica_waits_for_the_database_in_its_event_loop(
    play: Play, url: str, blobs: FolderBlobs, waited: list[str]
) -> None:
    async def accepted(replica: Replica, new: NewOperation, *rows: tables.Base) -> str:
        assert not await replica.journal.taken(new.lane, new.seq)
        return await replica.journal.accept(new, *rows)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        limits = [RateLimit("organisation", "org", None, None, 9), RateLimit("key", "7", None, None, 9)]
        async with trainer(url, blobs):
            for new, rows in (create(), (run_row(),)), (train(1), ()):
                await check_in_flight(limits, two.journal.in_flight, new)
                request_id = await accepted(two, new, *rows)
                assert (await one.result(request_id)).error is None
                two.journal.answers.clear()
                assert await two.journal.taken(new.lane, new.seq)
                assert await two.journal.accept(new) == request_id
        async with generator(url, blobs):
            for replica, other in ((one, two), (two, one)):
                for samples in replica.journal.samplers, other.journal.samplers:
                    samples._known.clear()
                begin = 0 if replica is one else 5
                ids = [await accepted(replica, sample(seq)) for seq in range(begin, begin + 5)]
                assert {(await other.result(request_id)).payload for request_id in ids} == {b"tokens"}
        assert await one.journal.cancel("org", "none") is False
        assert await one.journal.working_sessions() == set()
        assert (await one.journal.queue_lengths())["open"] == 0

    play(scenario)
    assert sorted(set(waited)) == []


def test_a_leader_takes_runs_up_and_breaks_them_without_waiting_for_the_database(play: Play, waited: list[str]) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await two.journal.accept(create(), run_row()), await two.journal.accept(train(1))]
        await one.lead()
        term = one.leadership.term
        assert term is not None
        training = term.journal.training
        await until(lambda: RUN in training.runs)
        training.setbacks.set_aside(SetAside(RUN, "its weights are damaged", lasting=True))
        for request_id in (*ids, await two.journal.accept(train(2))):
            ended = await two.result(request_id)
            assert "its weights are damaged. It has no checkpoint: start it again" in ended.error

    play(scenario)
    assert sorted(set(waited)) == []


def test_a_leader_that_has_much_to_take_up_stays_the_leader_meanwhile(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Term.begin

    async def long(self: Term) -> None:
        await asyncio.sleep(1.5 * tables.LEADS_S)
        await begin(self)

    monkeypatch.setattr(Term, "begin", long)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        first = one.leadership.term
        two.leadership.start()
        await until(lambda: first is not None and first._tasks)
        assert two.leadership.term is None
        assert one.leadership.term is first

    play(scenario)


def test_a_leader_goes_by_the_shares_of_organisations_as_they_are_now(
    play: Play, postgres_database: Database, url: str, blobs: FolderBlobs
) -> None:
    def share(weight: int) -> None:
        with_weight = update(tables.Organisation).where(tables.Organisation.id == "org").values(weight=weight)
        postgres_database.write_now(lambda session: session.execute(with_weight) and None)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        await asyncio.to_thread(share, 3)
        async with trainer(url, blobs):
            assert (await two.result(await two.journal.accept(create(), run_row()))).error is None
            term = one.leadership.term
            assert term is not None
            assert term.journal._weight("org") == 3
            await asyncio.to_thread(share, 5)
            await until(lambda: term.journal._weight("org") == 5)
        assert term.journal._weight("nobody") == 1

    play(scenario)


def test_a_leader_takes_answers_only_where_the_others_do_not_keep_up(url: str) -> None:
    queue = RedisQueue(url, "left to others")

    def answer(*names: str) -> None:
        queue.push_all(Item(name, ("m", "org", "interactive", "lane"), 10) for name in names)
        queue.answer_all((lease.id, lease.epoch, b"") for lease in queue.lease("w", ["m"], len(names), 60))

    async def scenario() -> None:
        journal: Any = SimpleNamespace(others=1, run=asyncio.to_thread)
        leader = SampleAnswers(journal, queue, journal, "leader", lambda: True)

        async def taken() -> list[str]:
            return [one.id for one in await leader._take()]

        assert queue.answered("other", 0.01) == []
        answer("a")
        await taken()
        assert [one.id for one in queue.answered("other", 0.01)] == ["a"]
        answer("b")
        assert await taken() == []  # another has taken something since
        assert await taken() == ["b"]  # and has not since
        many = [str(number) for number in range(BATCH + 1)]
        answer(*many)
        assert await taken() == many[:BATCH]
        assert await taken() == []
        journal.others = 0
        assert await taken() == many[BATCH:]

    asyncio.run(scenario())
    queue.close()


def test_a_replica_that_could_not_begin_to_lead_does_not_lead(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, tried = Term.begin, list[Term]()

    async def away(self: Term) -> None:
        tried.append(self)
        raise OperationalError("SELECT", {}, Exception("the connection is lost"))

    async def scenario(one: Replica, two: Replica) -> None:
        monkeypatch.setattr(Term, "begin", away)
        one.leadership.start()
        await until(lambda: tried)
        monkeypatch.setattr(Term, "begin", begin)
        async with asyncio.timeout(1):  # until its lease is over
            while one.leadership.term is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await until(lambda: one.leadership.term is not None)
        assert one.leadership.term is not tried[0]

    play(scenario)


def test_who_leads_knows_what_another_replica_told_of_a_failure_and_so_does_the_next(play: Play) -> None:
    """Whatever its client sends afterwards shows that the client knew; what it sent before shows nothing."""

    def knows(replica: Replica) -> int:
        term = replica.leadership.term
        return term.journal.training.runs[RUN].gradients.lacking(4, 0, None).knows if term else 0

    def there(replica: Replica) -> bool:
        term = replica.leadership.term
        return term is not None and RUN in term.journal.training.runs and term.journal.training.runs[RUN].next_seq == 4

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        await two.journal.accept(create(), run_row())
        refused = NewOperation("org", "s", RUN, 1, "forward_backward", "m", 10, b"bad", refused="too long")
        bad = await two.journal.accept(refused)
        await two.journal.accept(train(2))
        await two.journal.tell_failure("another", bad)
        await two.journal.tell_failure("org", bad)
        await two.journal.accept(train(3))
        await until(lambda: there(one))
        assert not knows(one)  # the second was sent before, and has not ended
        one.leadership.term.journal.training.runs[RUN].gradients.over(2, NOW_LONG_AGO)  # type: ignore[union-attr]
        await until(lambda: knows(one) == 1)
        await one.leadership.stop(0.1)
        await two.lead()
        await until(lambda: there(two))
        assert not knows(two)
        two.leadership.term.journal.training.runs[RUN].gradients.over(2, NOW_LONG_AGO)  # type: ignore[union-attr]
        assert knows(two) == 1

    play(scenario)


def test_the_next_leader_replays_and_the_old_one_can_do_nothing_more(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            first = [await one.journal.accept(create(), run_row()), await one.journal.accept(train(1))]
            for request_id in first:
                assert isinstance(await two.result(request_id), Outcome)
        old = one.leadership.term
        assert old is not None

        def usurp(session: Any) -> None:
            session.get_one(tables.JobLease, "journal").until = NOW_LONG_AGO

        await postgres_database.write(usurp)
        one.leadership._elections.cancel()  # type: ignore[union-attr]  # it is stopped, and does not notice
        await two.lead()
        pending = await two.journal.accept(train(2))
        await until(lambda: two.leadership.term.journal.training.opened(pending))  # type: ignore[union-attr]
        row = await postgres_database.write(lambda session: session.get_one(tables.Operation, pending))
        old.journal.training.enqueue(from_row(row))
        old.journal.training.finish(Done(pending, b"late", {"tokens": 10}))
        await old.journal.training.flush()
        assert isinstance(await two.result(pending, 0), Waiting)
        async with trainer(url, blobs) as given:
            assert (await two.result(pending)).payload == b"result"
        assert given[-3:] == [(0, True), (1, True), (2, False)]

    play(scenario)


def test_a_superseded_leader_waits_for_nothing_any_more(play: Play) -> None:
    def waits() -> bool:
        return any("Gaps" in str(task.get_coro()) for task in asyncio.all_tasks())

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        assert isinstance(await one.journal.accept(create(), run_row()), str)
        await one.journal.accept(train(2))
        await until(waits)
        await one.leadership.stop(0.1)
        await until(lambda: not waits())

    play(scenario)


def test_how_far_runs_are_is_known_after_redis_and_the_leader_were_lost(
    play: Play, url: str, blobs: FolderBlobs, board: PolicyBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_desk, "LOOK_AGAIN_S", 0.2)

    def known() -> PolicyMoved | None:
        return board.known([RUN]).get(RUN)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            await two.journal.accept(create(), run_row())
            inflight = NewSampler("s:sample:7", 7, inflight=True)
            await one.journal.accept(train(1, "optim_step"))
            saved = await two.journal.accept(train(2, "save_sampler", b"", inflight))
            await until(lambda: known() == PolicyMoved(RUN, 1, f"weights/{saved}", 2))
            last = await one.journal.accept(train(3, "optim_step"))
            newest = PolicyMoved(RUN, 2, f"weights/{saved}", 3)
            await until(lambda: known() == newest)
            assert (await two.result(last)).error is None
            redis.Redis.from_url(url).flushall()
            await until(lambda: known() == newest)
        await one.leadership.stop(0.1)
        redis.Redis.from_url(url).flushall()
        await two.lead()
        await until(lambda: known() == newest)

    play(scenario)


def test_whatever_redis_refuses_once_the_loops_of_a_replica_go_on(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    def once(whose: Any, name: str) -> None:
        call = getattr(whose, name)

        def refuse(*arguments: Any) -> Any:
            if name in refused:
                return call(*arguments)
            refused.append(name)
            raise redis.ResponseError("NOPERM this user has no permissions to run the command")

        monkeypatch.setattr(whose, name, refuse)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        for replica in (one, two):
            once(replica.queue, "settle")
            once(replica.board, "exchange")
        await until(lambda: "exchange" in refused)
        async with generator(url, blobs):
            for seq in range(3):
                assert isinstance(await one.result(await one.journal.accept(sample(seq))), Outcome)
            await until(lambda: "settle" in refused)
        await until(lambda: one.journal.others == two.journal.others == 1)

    play(scenario)


def test_a_sample_whose_sampler_is_gone_holds_up_no_other(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        there = one.journal.samplers.facts

        def facts(sampler_id: str) -> SamplerFacts:
            if sampler_id == "gone":
                raise NoResultFound
            return there(sampler_id)

        monkeypatch.setattr(one.journal.samplers, "facts", facts)
        gone = replace(sample(0), lane="gone")
        ids = await asyncio.gather(*map(one.journal.accept, (gone, sample(0), sample(1))))
        await until(lambda: one.queue.known(ids) == set(ids[1:]))

    play(scenario)


def test_a_sample_is_queued_at_what_it_may_use_and_with_the_share_of_its_organisation(
    play: Play, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_database.write_now(lambda session: session.execute(update(tables.Organisation).values(weight=3)))

    async def scenario(one: Replica, two: Replica) -> None:
        queued = list[Item]()
        monkeypatch.setattr(one.queue, "push_all", queued.extend)
        new = sample(0)
        await one.journal.accept(new)
        await until(lambda: queued)
        assert [(item.cost, item.weight) for item in queued] == [(new.tokens, 3)]

    play(scenario)


def test_a_waiting_sample_is_cancelled_from_any_replica(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until(lambda: one.queue.known([request_id]))
        assert isinstance(await two.result(request_id, 0), Waiting)
        assert await one.journal.outcome("other", request_id, 0) is None
        assert not await two.journal.cancel("other", request_id)
        with two.journal._waiters.on(request_id) as waiting:
            assert await two.journal.outcome("other", request_id, 0) is None
            assert await two.journal.cancel("org", request_id)
            await until(lambda: waiting.told)
            assert await two.journal.outcome("other", request_id, 0) is None
        outcome = await one.result(request_id)
        assert await one.journal.outcome("other", request_id, 0) is None
        sequences = decode_sample_response(outcome.payload).sequences
        assert {(sequence.tokens.size, sequence.stop_reason) for sequence in sequences} == {(0, "length")}
        assert not await two.journal.cancel("org", request_id)
        assert one.queue.peek() is None

    play(scenario)


class Away:
    """A queue that cannot be reached for a while after something was removed."""

    def __init__(self, queue: RedisQueue) -> None:
        self._queue, self._calls = queue, 0

    def remove(self, item_id: str) -> bool:
        found = self._queue.remove(item_id)
        self._calls += 1
        if self._calls < 3:
            raise QueueUnreachable("it is away")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


@pytest.mark.parametrize("lost", ["reply", "reply, and Redis is away for a while", "nothing, it is queued nowhere"])
def test_a_sample_is_cancelled_though_redis_does_not_say_so(
    play: Play, url: str, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(cancels, "AGAIN_S", 0.1)

    async def scenario(through: Proxy, one: Replica, two: Replica) -> None:
        far = RedisQueue(f"redis://127.0.0.1:{through.port}/0")
        two.journal._cancels = cancels.Cancels(far, two.broadcasts, two.journal.run)
        request_id = await one.journal.accept(sample(0))
        await until(lambda: one.queue.known([request_id]))
        if lost.startswith("nothing"):
            one.queue.remove(request_id)
        else:
            through.losing = b"remove"
        if lost == "reply, and Redis is away for a while":
            two.journal._cancels = cancels.Cancels(Away(far), two.broadcasts, two.journal.run)  # type: ignore[arg-type]
        assert await two.journal.cancel("org", request_id)
        outcome = await one.result(request_id)
        assert isinstance(outcome, Outcome)
        assert decode_sample_response(outcome.payload).sequences[0].tokens.size == 0
        assert one.queue.peek() is None
        far.close()

    with proxy(int(url.rsplit(":", 1)[1].split("/")[0])) as through:
        play(partial(scenario, through))


def test_a_sample_that_a_generator_holds_is_not_ended_by_cancelling_it(play: Play, blobs: FolderBlobs) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until(lambda: one.queue.known([request_id]))
        (lease,) = one.queue.lease("w", ["m"], 2, 60)
        assert await two.journal.cancel("org", request_id)
        await two.journal.flush()
        assert isinstance(await two.result(request_id, 0), Waiting)
        one.queue.answer(lease.id, lease.epoch, pack(Done(request_id, b"tokens", {"prefill": 5, "sample": 4}), blobs))
        assert (await one.result(request_id)).payload == b"tokens"

    play(scenario)


def test_an_answer_that_comes_twice_is_billed_once_and_counted_out_once(
    play: Play, blobs: FolderBlobs, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica has one more sample queued, by which one sees what is counted out too often."""

    async def scenario(one: Replica, two: Replica) -> None:
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda ends: None)
        bodies = (b"1", b"22", b"", b"", b"x" * (SMALL_BYTES + 1))
        stay = [await replica.journal.accept(sample(seq, bodies[seq])) for seq, replica in enumerate((one, two))]
        ids = [await one.journal.accept(sample(seq, bodies[seq])) for seq in (2, 3, 4)]
        rows = await postgres_database.write(lambda session: [session.get_one(tables.Operation, id) for id in ids])
        dones = [Done(id, b"tokens", {"prefill": 5, "sample": 4}) for id in ids]
        elsewhere, twice, heard = [(from_row(row), done) for row, done in zip(rows, dones, strict=True)]
        assert await two.journal.end(*elsewhere)  # which was accepted by the other one
        assert not await one.journal.end(*elsewhere)
        assert await asyncio.gather(*(one.journal.end(*twice) for _ in range(2))) == [True, False]
        ending = asyncio.create_task(one.journal.end(*heard))
        await asyncio.sleep(0)
        one.journal.heard([Ended(heard[0].id, "org", heard[0].lane, 4, "sample", 6)], 0)
        assert await ending
        await one.journal.flush()
        assert [replica.journal._backlog.own() for replica in (one, two)] == [{"org": (1, 1)}, {"org": (1, 2)}]
        assert [list(replica.journal._open) for replica in (one, two)] == [[each] for each in stay]
        assert not blobs.exists(rows[2].body_ref)

    play(scenario)
    assert count(postgres_database, tables.UsageEvent) == 3 * 2


def test_who_waits_where_an_operation_is_settled_needs_no_broadcast(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_journal, "LOOK_AGAIN_S", 1e6)

    async def scenario(one: Replica, two: Replica) -> None:
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda ends: None)
        await one.lead()
        async with trainer(url, blobs):
            request_id = await one.journal.accept(create(), run_row())
            assert isinstance(await one.result(request_id, 1e6), Outcome)

    play(scenario)


def test_what_redis_forgets_is_queued_again_by_the_leader(play: Play, url: str, blobs: FolderBlobs) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await two.journal.accept(sample(seq)) for seq in range(4)]
        ids.append(await two.journal.accept(create(), run_row()))
        await two.journal.flush()
        redis.Redis.from_url(url).flushall()
        await one.lead()
        async with generator(url, blobs), trainer(url, blobs):
            assert all([(await one.result(request_id)).error is None for request_id in ids])

    play(scenario)


def test_a_sample_is_told_whether_a_generator_is_there_that_has_its_model(
    play: Play, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until(lambda: one.queue.known([request_id]))
        nobody = "waiting for the generator, which is starting; it is next"
        assert await two.result(request_id, 0.02) == Waiting("paused_capacity", nobody)
        one.queue.lease("here", ["other"], 2, 60)
        others = "no generator here has its base model m: it waits until one has"
        assert await two.result(request_id, 0.02) == Waiting("paused_capacity", others)
        with monkeypatch.context() as patch:
            patch.setattr(presence, "GRACE_S", -1.0)
            told = await two.result(request_id, 0.02)
            assert isinstance(told, Waiting)
            assert told.unserved
            with announced(url, "generator", ["m"]):
                await until(two.loads.there)
                told = await two.result(request_id, 0.02)
                assert isinstance(told, Waiting)
                assert told.reason.startswith("waiting for the generator, which is starting: it has been loading m for")
                assert not told.unserved
            assert not two.loads.there()
            two.loads.say(Loading("killed", "generator", ["m"]))
            assert [one.name for one in two.loads.there()] == ["killed"]
            patch.setattr(loading, "LAPSES_S", -1)
            assert not two.loads.there()
        one.queue.lease("there", ["m", "other"], 0, 60)
        busy = "waiting for the generator, which is busy; it is next"
        assert await two.result(request_id, 0.02) == Waiting("active", busy)

    play(scenario)


def test_what_waits_for_a_generator_that_is_gone_fails_with_the_reason(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until(lambda: one.queue.known([request_id]))
        one.queue.lease("other", ["m"], 0, 1)
        (lease,) = one.queue.lease("here", ["m"], 2, 60)
        assert one.queue.decline(request_id, lease.epoch, "no routes here") == []
        await one.lead()
        outcome = await two.result(request_id)
        assert (outcome.error, outcome.category) == ("no routes here", "user")
        await until(lambda: not one.queue.known([request_id]))

    play(scenario)


def test_limits_hold_for_all_replicas_together(play: Play, url: str, blobs: FolderBlobs) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(0, b"x" * 6000)), await two.journal.accept(create(), run_row())]
        await until(lambda: two.journal._backlog.of("org") == one.journal._backlog.of("org") == (2, 6000))
        with pytest.raises(QueueFull, match="6000 bytes are queued and this operation has 4001"):
            await two.journal.accept(sample(1, b"x" * 4001))
        for replica in (one, two):
            in_flight = replica.journal.in_flight
            for scope, count in (("organisation", "org"), 2), (("organisation", "other"), 0), (("key", "7"), 0):
                assert (await in_flight.elsewhere(*scope)).count == count
            # Its run waits for it: it is always let in.
            assert (await in_flight.elsewhere("organisation", "org", train(1))).has
            assert not (await in_flight.elsewhere("organisation", "org", sample(1))).has
        await one.lead()
        async with generator(url, blobs), trainer(url, blobs):
            assert all([(await two.result(request_id)).error is None for request_id in ids])
        await until(lambda: two.journal._backlog.of("org") == (0, 0))
        assert (await two.journal.in_flight.elsewhere("organisation", "org")).count == 0
        await two.journal.accept(sample(1, b"x" * 4001))

    play(scenario)


def test_what_a_silent_replica_said_is_forgotten(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redis.Redis.from_url(url).flushall()
    board = BacklogBoard(url)
    assert board.exchange("dead", {"org": (5, 100)}) == []
    assert board.exchange("alive", {"org": (1, 2)}) == [{"org": [5, 100]}]  # type: ignore[comparison-overlap]
    monkeypatch.setattr(shared_limits, "SILENT_S", -1)
    assert board.exchange("alive", {}) == []
    board.close()


def test_lost_messages_only_delay(play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_journal, "LOOK_AGAIN_S", 0.3)

    async def scenario(one: Replica, two: Replica) -> None:
        real = Broadcasts.ended
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda end: None)
        request_id = await one.journal.accept(sample(0))
        async with generator(url, blobs):
            assert isinstance(await two.result(request_id), Outcome)
        assert one.journal._open.keys() | two.journal._open.keys() <= {request_id}
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda end, replica=replica: real(replica.broadcasts, end))
        await until(lambda: not one.journal._open and not two.journal._open)
        await until(lambda: one.journal._backlog.of("org") == two.journal._backlog.of("org") == (0, 0))

    play(scenario)


def test_a_session_that_ends_on_one_replica_closes_its_run_on_the_other(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            await two.result(await two.journal.accept(create(), run_row()))

            def finish(session: Any) -> None:
                session.get_one(tables.Session, "s").state = "finished"

            await postgres_database.write(finish)
            two.journal.close_run(RUN)
            await until(lambda: RUN not in one.leadership.term.journal.training.runs)  # type: ignore[union-attr]
        with pytest.raises(RunClosed):
            await two.journal.accept(train(1))

    play(scenario)


def test_nothing_new_without_redis_or_while_draining(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        one.journal.reachable = lambda: False
        two.journal.draining = True
        for replica in (one, two):
            with pytest.raises(Draining):
                await replica.journal.accept(sample(0))

    play(scenario)
