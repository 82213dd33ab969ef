"""Where bodies and results are stored, over a restart: small ones in their operations' rows, others in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler.journal import rows
from scheduler.journal.ending.outcomes import result_ref
from scheduler.journal.recovery import recover
from scheduler.links.messages import Done, PullPass, PullSamples, SampleWork
from scheduler.order.operations import SequenceReused
from scheduler.order.plans import Load, Plan, Save, Source
from store import tables
from tests.scheduler.journal.kit import RESULT, Service, first_pass, go, ops, outcome, sample, train

#: Bytes that are not text.
TOKENS = b"\x0a\x00\xff"


def test_small_bodies_and_results_are_no_files(folder: Path) -> None:
    """A step is stored in its row only, and is replayed and answered from there; so is a small sample, whose prompt is
    deleted when it ends."""
    step = train(1, "optim_step", b'{"learning_rate":1}')

    async def before() -> tuple[str, str]:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            stepped = await service.journal.accept(step)
            pass_ = await service.ask(link, PullPass(["m"]))
            assert [(op.body, op.body_ref) for op in pass_.ops] == [(step.body, "")]
            await service.answer(link, pass_)
            await outcome(service, stepped)
        async with service.worker(service.generator) as link:
            sampled = await service.journal.accept(sample(0))
            work: SampleWork = await service.ask(link, PullSamples(["m"], 4))
            assert [(op.body, op.body_ref) for op in work.ops] == [(b"{}", "")]
            assert [row.body for row in service.rows(tables.Operation) if row.id == sampled] == ["{}"]
            link.send(Done(sampled, TOKENS, {"prefill": 1, "cached_prefill": 0, "sample": 1}))
            await outcome(service, sampled)
        assert {row.id: row.body for row in service.rows(tables.Operation)}[sampled] is None
        assert service.blobs.listed("ops/*/*") == {}
        assert service.blobs.listed("results/*/*") == {}
        service.database.close()
        return stepped, sampled

    async def after(stepped: str, sampled: str) -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        assert (await outcome(service, stepped)).payload == b"result"
        assert (await outcome(service, sampled)).payload == TOKENS
        async with service.worker(service.trainer) as link:
            await service.journal.accept(train(2))
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_)[1:] == [(1, True), (2, False)]
            assert pass_.ops[1].body == step.body

    async def both() -> None:
        await after(*await before())

    go(both())


def test_a_large_result_is_a_file(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            trained = await service.journal.accept(train(1))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            assert (await outcome(service, trained)).payload == RESULT
        assert list(service.blobs.listed("results/*/*")) == [result_ref(trained)]
        service.database.close()

    go(scenario())


@pytest.mark.parametrize("kind", ["load_state", "save_state"])
def test_what_no_worker_reads_is_kept_nowhere(folder: Path, kind: str) -> None:
    """A load may contain somebody's key."""
    plans: dict[str, Plan] = {
        "load_state": Load(Source("weights/a", "tinker://a/weights/a", with_optimizer=False)),
        "save_state": Save("weights", "a"),
    }

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            new = train(1, kind, b'{"weights_access_token":"tml-secret"}', plans[kind])
            accepted = await service.journal.accept(new)
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, accepted)
            assert await service.journal.accept(new) == accepted
            with pytest.raises(SequenceReused):
                await service.journal.accept(replace(new, body=b"another"))
        service.database.close()

    go(scenario())
    assert not any(b"tml-secret" in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_what_an_older_version_has_left_in_files_is_replayed_and_answered(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [train(seq, "optim_step", b'{"learning_rate":%d}' % seq) for seq in (1, 2)]

    async def before() -> list[str]:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            done = await service.journal.accept(steps[0])
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, done)
        queued = await service.journal.accept(steps[1])
        assert [row.body for row in service.rows(tables.Operation)] == [None] * 3
        service.database.close()
        return [done, queued]

    async def after(done: str, queued: str) -> None:
        service = Service(folder)
        recover(service.journal, service.database)
        assert (await outcome(service, done)).payload == b"result"
        async with service.worker(service.trainer) as link:
            pass_ = await service.ask(link, PullPass(["m"]))
            assert ops(pass_) == [(0, True), (1, True), (2, False)]
            bodies = [service.blobs.get(op.body_ref, op.body_sha256) for op in pass_.ops[1:] if not op.body]
            assert bodies == [step.body for step in steps]
            await service.answer(link, pass_)
            await outcome(service, queued)
        row = next(row for row in service.rows(tables.Operation) if row.id == queued)
        assert (row.body, row.body_ref != "", row.result) == (None, True, "result")

    async def both() -> None:
        with monkeypatch.context() as older:
            older.setattr(rows, "SMALL_BYTES", -1)
            op_ids = await before()
        await after(*op_ids)

    go(both())
