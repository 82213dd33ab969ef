"""No organisation takes all threads, however much it reads at once, and nothing is read for a client that has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import orjson
import pytest
import zstandard
from sqlalchemy import event
from sqlalchemy.orm import Session
from weft.wire import CheckpointsListResponse
from weft.wire.turns import Turn, TurnsResponse

from api.console import sessions
from api.errors import RateLimited
from api.routes.openai import turns
from api.routes.openai.models import Target
from api.routes.openai.text import AT_ONCE, in_turn
from api.routes.runs import metrics, trace
from api.routes.stored import checkpoints
from api.state import remembered, threads
from api.state.large_bodies import SMALL_BYTES
from api.state.service import LARGE_AT_ONCE, WORKS_AT_ONCE
from api.who.principal import Principal
from store import curves, tables
from store.database.caller import Caller, become
from store.people import keys
from tests.api.conftest import World
from tests.tenancy.conftest import org_id_of

#: More than there are threads.
MANY = 60
#: Routes that work in the common threads, and why one organisation does not take all of those.
ANYBODYS = {
    "server/tokenizers.py": "hashes files of a tokenizer once",
}


class Held:
    """Works that stay in their thread until they are released."""

    def __init__(self) -> None:
        self.go, self._inside = threading.Event(), threading.Semaphore(0)

    def work(self, *_: Any) -> bool:
        self._inside.release()
        return self.go.wait(60)

    async def begun(self, count: int) -> bool:
        """Whether so many have begun, and no more."""
        for _ in range(count):
            assert await asyncio.to_thread(self._inside.acquire, timeout=30)
        await asyncio.sleep(0.05)
        return not self._inside.acquire(blocking=False)


def test_who_reads_much_at_once_leaves_threads_to_others(world: World) -> None:
    held, service = Held(), world.service

    async def story() -> None:
        become(Caller("acme", "key 1"))
        reads = [asyncio.ensure_future(service.read(held.work)) for _ in range(MANY)]
        assert await held.begun(WORKS_AT_ONCE)
        become(Caller("rival", "key 2"))
        assert await asyncio.wait_for(service.read(lambda _session: "read"), 30) == "read"
        held.go.set()
        assert await asyncio.gather(*reads) == [True] * MANY

    world.http.portal.call(story)  # type: ignore[union-attr]


@pytest.mark.parametrize("door", ["key", "console", "key of nobody"])
def test_strangers_leave_threads_to_others(world: World, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    """Each guess at a key or a session is looked up in the database, whoever makes it."""
    held, wrong = Held(), {"cookie": "weft_console=wrong"} if door == "console" else {"x-api-key": "tml-wrong"}
    if door == "key of nobody":
        wrong["x-forwarded-for"] = "unknown"
    monkeypatch.setattr(remembered, "REMEMBERED_S", 600.0)
    world.get("training_runs")  # from here on the key is known

    def nobody(*_: Any) -> None:
        held.work()

    def guess(_: int) -> int:
        reply = world.http.get("/console/" if door == "console" else "/v1/models", headers=wrong)
        return int(reply.status_code)

    monkeypatch.setattr(keys, "find", nobody)
    monkeypatch.setattr(sessions, "signed_in", nobody)
    with ThreadPoolExecutor(MANY) as strangers:
        guesses = [strangers.submit(guess, number) for number in range(MANY)]
        try:
            assert asyncio.run(held.begun(WORKS_AT_ONCE))
            world.get("training_runs")
        finally:
            held.go.set()
    assert {each.result() for each in guesses} == {401}


def test_a_line_has_an_end_and_what_was_let_in_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    held, service, org_id = Held(), world.service, org_id_of(world)
    monkeypatch.setattr(threads, "MOST_WAITING", 3)

    async def story() -> None:
        become(Caller(org_id, "key 1"))
        reads = [asyncio.ensure_future(service.read(held.work)) for _ in range(WORKS_AT_ONCE + 3)]
        texts = [asyncio.ensure_future(in_turn(org_id, held.work)) for _ in range(AT_ONCE)]
        assert await held.begun(WORKS_AT_ONCE + AT_ONCE)
        refused = await asyncio.to_thread(world.call, "GET", "training_runs")
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == str(threads.COME_AGAIN_S)
        assert "3 requests of this organisation wait in line" in refused.json()["detail"]
        other = await asyncio.to_thread(world.call, "GET", "training_runs", key=world.other_key)
        assert other.status_code == 200
        reads.append(asyncio.ensure_future(service.read(held.work)))  # of a request that was let in before
        held.go.set()
        assert await asyncio.gather(*reads, *texts) == [True] * (WORKS_AT_ONCE + 4 + AT_ONCE)
        assert (await asyncio.to_thread(world.call, "GET", "training_runs")).status_code == 200

    world.get("training_runs")  # the key is known from here on
    world.get("training_runs", key=world.other_key)
    world.http.portal.call(story)  # type: ignore[union-attr]


def test_what_is_large_is_worked_on_a_few_at_a_time_by_turns_of_organisations(world: World) -> None:
    """Forty threads that read or wrote large bodies held the interpreter, and so the event loop, for seconds."""
    held, service, begun = Held(), world.service, list[str]()

    def work(org_id: str) -> bool:
        begun.append(org_id)
        return held.work()

    async def large(org_id: str) -> bool:
        become(Caller(org_id, "key 1"))
        return await service.work(SMALL_BYTES + 1, partial(work, org_id))

    async def story() -> None:
        asked = [asyncio.ensure_future(large(org_id)) for org_id in ["crowd"] * MANY + ["a", "b"]]
        assert await held.begun(LARGE_AT_ONCE)
        become(Caller("crowd", "key 1"))
        assert await asyncio.wait_for(service.work(SMALL_BYTES, lambda: "small"), 30) == "small"
        held.go.set()
        assert await asyncio.gather(*asked) == [True] * (MANY + 2)

    world.http.portal.call(story)  # type: ignore[union-attr]
    assert max(map(begun.index, ["a", "b"])) < MANY // 4  # which thread reports first depends on the machine


def test_curves_are_read_one_at_a_time_and_leave_threads_to_colleagues(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have twelve million points: forty requests for them took every thread for minutes."""
    run, held = world.run(), Held()
    world.post(f"weft/runs/{run}/metrics", {"points": [{"name": "a", "step": 1, "value": 2.0}]})

    def slow(session: Session, *about: Any) -> curves.Curve:
        held.work()
        return curves.read_curve(session, *about)

    monkeypatch.setattr(metrics, "read_curve", slow)
    assert _one_at_a_time(world, held, f"weft/runs/{run}/metrics")


def test_checkpoints_of_a_run_are_read_one_at_a_time_and_written_outside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have tens of thousands: ten requests for them held everybody up."""
    run, held, writers = world.run(), Held(), set[int]()
    path = world.checkpoint(run, 1)

    class Slow(CheckpointsListResponse):
        def model_dump_json(self, **options: Any) -> str:
            writers.add(threading.get_ident())
            held.work()
            return super().model_dump_json(**options)

    monkeypatch.setattr(checkpoints, "CheckpointsListResponse", Slow)
    assert _one_at_a_time(world, held, f"training_runs/{run}/checkpoints")
    assert world.http.portal.call(_thread) not in writers  # type: ignore[union-attr]
    found = world.get(f"training_runs/{run}/checkpoints")
    assert [one["tinker_path"] for one in found["checkpoints"]] == [path]
    assert "cursor" not in found


def test_who_describes_runs_reads_their_last_checkpoints_alone(world: World) -> None:
    """All checkpoints of every run on a page were read."""
    run, other = world.run(), world.run(number=1)
    paths = [world.checkpoint(run, seq, name) for seq, name in enumerate(("a", "b", "c"), 1)]
    first = world.checkpoint(other, 1, "z", sampler=True)
    read = list[str]()

    def loaded(row: tables.Checkpoint, _context: Any) -> None:
        read.append(row.name)

    event.listen(tables.Checkpoint, "load", loaded)
    try:
        shown = {found["training_run_id"]: found for found in world.get("training_runs")["training_runs"]}
    finally:
        event.remove(tables.Checkpoint, "load", loaded)
    assert shown[run]["last_checkpoint"]["tinker_path"] == paths[-1]
    assert shown[other]["last_sampler_checkpoint"]["tinker_path"] == first
    assert sorted(read) == ["c", "z"]


def _one_at_a_time(world: World, held: Held, path: str) -> bool:
    answers: list[int] = []
    asking = [
        threading.Thread(target=lambda: answers.append(world.call("GET", path).status_code))
        for _ in range(WORKS_AT_ONCE + 2)
    ]
    for thread in asking:
        thread.start()
    alone = world.http.portal.call(held.begun, 1)  # type: ignore[union-attr]
    assert world.get("training_runs")["cursor"]["offset"] == 0, "colleagues read meanwhile"
    held.go.set()
    for thread in asking:
        thread.join(30)
    return alone and answers == [200] * len(asking)


def test_turns_are_written_one_answer_at_a_time_and_not_in_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve requests for twenty megabytes of turns blocked everybody for a quarter of a minute, and took gigabytes."""
    held, writers = Held(), set[int]()
    turn = {"request_id": "r", "choice": 0, "model": "m", "at": 0.5, "prompt": [1], "tokens": [2], "logprobs": [-1.0]}
    turn |= {"versions": [[1, 1]], "stop_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    both = [turn | {"choice": choice, "sequence_id": f"r-{choice}", "stale": False} for choice in range(2)]
    now, about = datetime.now(UTC), {"org_id": org_id_of(world), "name": "mine", "size_bytes": 1}
    for number in range(3):
        row = tables.SessionTurn(request_id=f"r{number}", ref=f"turns/x/r{number}", created_at=now, **about)
        if number != 1:  # no longer kept
            world.service.blobs.put(row.ref, zstandard.compress(msgspec.msgpack.encode(both)))
        world.database.write_now(lambda session, row=row: session.add(row))
    told = TurnsResponse.model_validate(world.get("weft/turns/mine"))
    assert [shown.model_dump(mode="json") for shown in told.turns] == [*both, *both]
    assert (told.session, told.next) == ("mine", None)

    def slow(value: Any) -> bytes:
        writers.add(threading.get_ident())
        held.work()
        return orjson.dumps(value)

    monkeypatch.setattr(turns, "orjson", SimpleNamespace(dumps=slow))
    assert _one_at_a_time(world, held, "weft/turns/mine")
    assert world.http.portal.call(_thread) not in writers  # type: ignore[union-attr]


def test_turns_are_made_and_packed_outside_the_event_loop(world: World) -> None:
    """A thousand choices for one long prompt are millions of numbers, which blocked everybody for seconds."""
    makers, org_id = set[int](), org_id_of(world)

    def made() -> Iterator[Turn]:
        for choice in range(2):
            makers.add(threading.get_ident())
            yield Turn(
                request_id="r1", choice=choice, model="m", at=0.5, prompt=[1], tokens=[2], logprobs=[-1.0],
                versions=[(1, 1)], stop_reason="stop",
            )  # fmt: skip

    who = Principal(org_id, 1)
    target = cast(Target, SimpleNamespace(submitter=SimpleNamespace(project_id=None)))

    async def story() -> None:
        await turns.record(world.service, who, "mine", target, "r1", made())

    world.http.portal.call(story)  # type: ignore[union-attr]
    assert world.http.portal.call(_thread) not in makers  # type: ignore[union-attr]
    assert [turn["choice"] for turn in world.get("weft/turns/mine")["turns"]] == [0, 1]


async def _thread() -> int:
    return threading.get_ident()


def test_who_packs_many_archives_at_once_leaves_threads_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = world.checkpoint(world.run(), 1), Held()
    url = path.replace("tinker://", "training_runs/").replace("/weights/", "/checkpoints/weights/") + "/archive"
    monkeypatch.setattr(checkpoints, "make_archive", held.work)
    statuses = _leaves_threads_to_others(
        world, held, lambda: world.call("GET", url, follow_redirects=False).status_code
    )
    assert statuses == [302] * (WORKS_AT_ONCE + 2)


def test_who_fetches_many_traces_at_once_leaves_threads_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces are drawn anew for anybody with the link, as often as they ask."""
    held, url = Held(), world.get(f"sessions/{world.session()}/trace_export")["url"]
    monkeypatch.setattr(trace, "trace", lambda *_: (b"piece" for _ in range(1) if held.work()))
    statuses = _leaves_threads_to_others(world, held, lambda: world.http.get(url).status_code)
    assert statuses == [200] * (WORKS_AT_ONCE + 2)


def _leaves_threads_to_others(world: World, held: Held, ask: Callable[[], int]) -> list[int]:
    """The answers to a client that asks for more works at once than it is given threads."""
    statuses: list[int] = []
    asking = [threading.Thread(target=lambda: statuses.append(ask())) for _ in range(WORKS_AT_ONCE + 2)]
    for thread in asking:
        thread.start()
    assert world.http.portal.call(held.begun, WORKS_AT_ONCE)  # type: ignore[union-attr]
    assert world.get("training_runs", key=world.other_key)["training_runs"] == []
    held.go.set()
    for thread in asking:
        thread.join(30)
    return statuses


def test_of_a_client_that_has_left_no_curve_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = world.run(), list[str]()
    world.post(f"weft/runs/{run}/metrics", {"points": [{"name": "a", "step": 1, "value": 2.0}]})

    def noted(session: Session, org_id: str, run_id: str, name: str, limit: int) -> curves.Curve:
        read.append(name)
        return curves.read_curve(session, org_id, run_id, name, limit)

    monkeypatch.setattr(metrics, "read_curve", noted)
    headers = [(b"x-api-key", world.key.encode())]
    scope = {"type": "http", "method": "GET", "path": f"/api/v1/weft/runs/{run}/metrics", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("testserver", 80), "scheme": "http"}

    async def asked(gone: bool) -> None:
        async def receive() -> dict[str, Any]:
            if not gone:
                await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None: ...

        await world.http.app(dict(scope), receive, send)

    world.http.portal.call(asked, True)  # type: ignore[union-attr]
    assert read == []
    world.http.portal.call(asked, False)  # type: ignore[union-attr]
    assert read == ["a"]


def test_routes_work_in_their_organisations_share() -> None:
    routes = Path(checkpoints.__file__).parents[1]
    found = {str(file.relative_to(routes)) for file in routes.rglob("*.py") if "run_in_threadpool(" in file.read_text()}
    assert found == {*ANYBODYS}


def test_who_has_more_in_line_than_may_be_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the same moment were let in before any of them stood in line."""
    for count, refused in ((threads.MOST_WAITING - 1, False), (threads.MOST_WAITING, True), (9999, True)):
        monkeypatch.setitem(threads._waiting, "crowd", count)
        with pytest.raises(RateLimited) if refused else nullcontext():
            threads.check_line("crowd")
