"""The logprobs of a sample are stored for training before it is answered, and belong to that answer."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response

from billing.reports.reconcile import check
from scheduler.journal import storing
from scheduler.journal.ending.settlement import Settlement
from scheduler.links.messages import Done, Failure, PullSamples
from store import tables
from tests.scheduler.journal.kit import Service, create, go, outcome, run_row, sample, train


def drawn(op_id: str, *sequences: list[float], recorded: bool = True) -> Done:
    """An answer whose sequences have these log-probabilities."""
    results = [SequenceResult(np.arange(len(s), dtype=np.int32), np.array(s, np.float32), "stop") for s in sequences]
    return Done(op_id, encode_sample_response(results), {"prefill": 4, "sample": 3}, recorded=recorded)


def kept(service: Service) -> dict[str, list[float]]:
    blobs = service.blobs
    return {ref: np.frombuffer(blobs.get(ref), "<f4").tolist() for ref in blobs.listed("stability/*/*")}


def test_what_is_answered_is_kept_whatever_else_was_drawn(folder: Path) -> None:
    """Weights may have moved between the draws of two generators. A sample without tokens has no file: it would be one
    that costs no money."""

    async def scenario() -> None:
        service = Service(folder)
        one, plain, failed = [await service.journal.accept(sample(seq)) for seq in range(3)]
        async with service.worker(service.generator) as given_up:
            await service.ask(given_up, PullSamples(["m"], 6))
        async with service.worker(service.generator) as other:
            await service.ask(other, PullSamples(["m"], 6))
            other.send(drawn(one, [-1.0, -2.0], []))
            other.send(drawn(plain, [-4.0], recorded=False))
            other.send(Done(failed, failure=Failure("no", "user"), recorded=True))
            assert [(await outcome(service, i)).error for i in (one, plain, failed)] == [None, None, "no"]
        service.journal.finish(drawn(one, [-3.0, -3.0]))  # comes when it does not count any more
        await asyncio.sleep(0.05)
        assert kept(service) == {f"stability/s/{one}:0": [-1.0, -2.0]}

    go(scenario())


def test_a_store_that_takes_nothing_for_a_while_delays_the_answer(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        service = Service(folder)
        monkeypatch.setattr(storing, "AGAIN_S", (0.0, 0.0))
        real, refusals, refusing = service.blobs.put, iter(range(5)), asyncio.Event()
        loop = asyncio.get_running_loop()

        def put(ref: str, data: bytes) -> None:
            if ref.startswith("stability/") and next(refusals, None) is not None:
                loop.call_soon_threadsafe(refusing.set)
                raise OSError(5, "Input/output error")
            real(ref, data)

        monkeypatch.setattr(service.blobs, "put", put)
        op_id = await service.journal.accept(sample(0))
        async with service.worker(service.generator) as link:
            await service.ask(link, PullSamples(["m"], 2))
            link.send(drawn(op_id, [-1.0], [-2.0, -3.0]))
            await refusing.wait()
            await service.journal.cancel("org", op_id)  # too late: it has been computed, and is billed
            assert (await outcome(service, op_id)).error is None
        assert next(refusals, None) is None
        assert kept(service) == {f"stability/s/{op_id}:0": [-1.0], f"stability/s/{op_id}:1": [-2.0, -3.0]}

    go(scenario())


def test_what_was_stored_although_the_answer_was_lost_is_told_as_done(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        service = Service(folder)
        monkeypatch.setattr(storing, "AGAIN_S", (0.0, 0.0))
        op_id = await service.journal.accept(sample(0))
        dialect = service.database._write_engine.dialect
        commit, lost = dialect.do_commit, [True]

        def lose(connection: Any) -> None:
            commit(connection)
            if lost:
                lost.pop()
                raise sqlite3.OperationalError("the answer is lost")

        monkeypatch.setattr(dialect, "do_commit", lose)
        service.journal.finish(drawn(op_id, [-1.0], recorded=False))
        assert (await outcome(service, op_id)).error is None
        assert not lost
        assert service.journal.opened(op_id) is None
        assert check(service.database) == []

    go(scenario())


def test_what_cannot_be_recorded_fails_and_costs_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that has computed it is not what its journal says any more."""

    async def scenario() -> None:
        service = Service(folder)
        begun = await service.journal.accept(create(), run_row())
        service.journal.finish(Done(begun, b""))
        assert (await outcome(service, begun)).error is None
        real, wrong = Settlement.settle, list[bool]()

        def settle(self: Settlement, *given: Any) -> Any:
            if wrong:
                wrong.pop()
                raise ValueError("a fault of ours")
            return real(self, *given)

        monkeypatch.setattr(Settlement, "settle", settle)
        for new in (sample(0), train(1, "forward"), train(2)):
            op_id = await service.journal.accept(new)
            wrong.append(True)
            service.journal.finish(Done(op_id, encode_sample_response([]), {"tokens": 10, "sample": 3}))
            said = "the server could not record the result; it is not billed"
            assert (await outcome(service, op_id)).error == said
        await service.journal.flush()
        assert [row.state for row in service.rows(tables.Operation)].count("failed") == 3
        assert (service.rows(tables.UsageEvent), check(service.database)) == ([], [])
        (run,) = service.rows(tables.Run)
        assert "operation 2 was computed and cannot be recorded (ValueError)" in run.broken

    go(scenario())
