"""The loop of the generator process: over a scripted link, and as a real process on the built-in model."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from weft.wire import ModelInput, SampleRequest, SamplingParams as WireSamplingParams
from weft.wire.binary.sample_codec import decode_sample_response

import workers.model.tiny
from scheduler.links.configs import Basics, GeneratorConfig
from scheduler.links.messages import (
    Cancel,
    Declined,
    Done,
    Drain,
    Occupancy,
    PolicyMoved,
    PullSamples,
    SampleOp,
    SampleWork,
)
from scheduler.links.sockets import ServerLink
from store.blobs.contract import StoreAway, Weights, reading
from store.blobs.folder import FolderBlobs
from tests.forked import Forked
from workers.generator import adapters
from workers.generator.torch_engine import TorchEngine
from workers.generator.worker import Generator
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

TINY = Path(workers.model.tiny.__file__).parent / "weights"


def put_op(blobs: FolderBlobs, op_id: str, *, samples: int = 1, adapter_ref: str = "", **params: Any) -> SampleOp:
    sampling = WireSamplingParams.model_validate({"stop": [], "max_tokens": 5, "seed": 0, **params})
    body = SampleRequest(prompt=ModelInput.from_ints([20, 30, 40]), sampling_params=sampling, num_samples=samples)
    blobs.put(f"ops/{op_id}", body.model_dump_json(exclude_none=True).encode())
    return SampleOp(op_id, "base", f"ops/{op_id}", samples, adapter_ref)


class ScriptedLink:
    """Plays the server: each pull is answered by the next of `work`; at the end of the script it drains."""

    def __init__(self, work: list[list[SampleOp]], drain: bool = True) -> None:
        self.work = deque(work)
        self.inbox: deque[Any] = deque()
        self.sent: list[msgspec.Struct] = []
        self.drain = drain

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)
        if isinstance(message, PullSamples):
            if self.work:
                self.inbox.append(SampleWork(self.work.popleft()))
            elif self.drain:
                self.inbox.append(Drain())

    def recv(self, timeout_s: float | None = None) -> Any:
        return self.inbox.popleft() if self.inbox else None

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def generator(decoder: Decoder, blobs: FolderBlobs, link: ScriptedLink, slots: int = 4) -> Generator:
    return Generator({"base": TorchEngine(decoder, (), slots=slots, context=64)}, blobs, link, slots=slots)


def test_a_disk_that_does_not_answer_delays_a_sample(
    decoder: Decoder, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body cannot be read more often than it has lives."""
    monkeypatch.setattr("workers.generator.worker.DISK_AGAIN_S", 0.0)
    op = put_op(blobs, "a")
    real, refusals = blobs.get, iter(range(5))

    def refused(*arguments: Any) -> Any:
        if next(refusals, None) is not None:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(blobs, "get", refused)
    link = ScriptedLink([[op]], drain=False)
    serving = generator(decoder, blobs, link)
    send = link.send

    def drained_at_the_end(message: msgspec.Struct) -> None:
        send(message)
        if isinstance(message, Done):
            serving.drain()

    monkeypatch.setattr(link, "send", drained_at_the_end)
    serving.serve()
    assert [(done.op_id, done.failure, done.facts["sample"]) for done in link.of(Done)] == [("a", None, 5)]
    assert next(refusals, None) is None


class FarBlobs(FolderBlobs):
    """A store that does not answer for "ops/far" until it is `there`, or for ever."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.threads = ThreadPoolExecutor(4)
        self.there, self.asked = threading.Event(), 0

    def get(self, ref: str, sha256: str = "") -> bytes:
        if ref == "ops/far":
            self.asked += 1
            if not self.there.wait(20):
                raise StoreAway("the server's object store does not answer (Unreachable)")
        return super().get(ref, sha256)


def far(decoder: Decoder, blobs: FolderBlobs, work: list[list[SampleOp]]) -> tuple[FarBlobs, ScriptedLink, Generator]:
    store, link = FarBlobs(blobs.root), ScriptedLink(work)
    return store, link, generator(decoder, store, link)


def test_a_body_that_is_long_in_coming_holds_up_no_other_sample(decoder: Decoder, blobs: FolderBlobs) -> None:
    work = [[put_op(blobs, "a", max_tokens=20)], [put_op(blobs, "far"), put_op(blobs, "b", max_tokens=30)]]
    store, link, serving = far(decoder, blobs, work)
    send = link.send

    def sent(message: msgspec.Struct) -> None:
        send(message)
        if len(link.of(Done)) == 2:
            store.there.set()

    link.send = sent  # type: ignore[method-assign]
    serving.serve()
    assert [(done.op_id, done.failure) for done in link.of(Done)] == [("a", None), ("b", None), ("far", None)]
    assert store.asked == 1


def test_what_is_recorded_is_for_whoever_takes_the_answer_to_keep(decoder: Decoder, blobs: FolderBlobs) -> None:
    """A generator that is given up may end after another, which draws from newer weights, has answered."""
    op = msgspec.structs.replace(put_op(blobs, "a"), session_id="s")
    body = msgspec.json.decode(blobs.get("ops/a")) | {"record_stability_info": True}
    blobs.put("ops/a", msgspec.json.encode(body))
    link = ScriptedLink([[op], [put_op(blobs, "b")]])
    generator(decoder, blobs, link).serve()
    assert {done.op_id: done.recorded for done in link.of(Done)} == {"a": True, "b": False}
    assert not [*blobs.listed("stability/*/*")]


def test_what_waits_for_its_body_has_its_slots_follows_its_policy_and_can_be_cancelled(
    decoder: Decoder, blobs: FolderBlobs
) -> None:
    ops = [put_op(blobs, "a", samples=2), put_op(blobs, "far", samples=2)]
    ops[1] = msgspec.structs.replace(ops[1], run_id="mine", version=1)
    store, link, serving = far(decoder, blobs, [ops])
    link.drain = False
    serving._pull()
    serving._receive()
    serving._pull()
    assert [pull.free_slots for pull in link.of(PullSamples)] == [4]
    link.inbox.append(PolicyMoved("mine", 2))
    serving._receive()
    assert serving._coming["far"].version == 2
    link.inbox += [Cancel("far"), Drain()]
    serving.serve()
    assert {done.op_id: done.failure is None for done in link.of(Done)} == {"a": True, "far": False}
    store.there.set()


def test_pulls_serves_and_drains(decoder: Decoder, blobs: FolderBlobs) -> None:
    link = ScriptedLink([[put_op(blobs, "a", samples=3)], [put_op(blobs, "b", max_tokens=9), put_op(blobs, "c")]])
    generator(decoder, blobs, link).serve()
    done = {message.op_id: message for message in link.of(Done)}
    assert set(done) == {"a", "b", "c"}
    assert done["a"].facts == {"prefill": 3, "cached_prefill": 6, "sample": 15}
    assert len(decode_sample_response(done["b"].payload).sequences[0].tokens) == 9
    pulls = link.of(PullSamples)
    assert pulls[0] == PullSamples(["base"], 4)
    assert (
        pulls[1].free_slots == 4
    )  # one slot was still the server's to fill, so nothing was asked until more came free
    occupancy = link.of(Occupancy)
    assert sum(message.slots_busy for message in occupancy) == 3 * 4 + 8 + 4
    assert sum(message.slots_offered for message in occupancy) == 4 * sum(message.steps for message in occupancy)


def test_what_was_drafted_is_told(decoder: Decoder, blobs: FolderBlobs) -> None:
    link = ScriptedLink([[put_op(blobs, "a", max_tokens=60, temperature=0)]])
    engine = TorchEngine(decoder, (), slots=4, context=64, lookup=3)
    Generator({"base": engine}, blobs, link, slots=4).serve()
    drafted, accepted = (sum(getattr(each, name) for each in link.of(Occupancy)) for name in ("drafted", "accepted"))
    assert (drafted, accepted) == (engine.stats().drafted_tokens, engine.stats().accepted_tokens)
    assert 0 < accepted <= drafted


def test_waiting_for_work_is_not_work(decoder: Decoder, blobs: FolderBlobs) -> None:
    now = 0.0

    class Slow(ScriptedLink):
        def recv(self, timeout_s: float | None = None) -> Any:
            nonlocal now
            now += timeout_s or 0.0
            return super().recv(timeout_s)

    link = Slow([[put_op(blobs, "a")], [put_op(blobs, "b")]])
    engines = {"base": TorchEngine(decoder, (), slots=4, context=64)}
    Generator(engines, blobs, link, slots=4, clock=lambda: now).serve()
    assert now >= 0.5  # it has waited
    assert link.of(Occupancy)
    assert sum(message.seconds for message in link.of(Occupancy)) == 0.0


def test_faults_fail_one_operation_each(decoder: Decoder, blobs: FolderBlobs) -> None:
    blobs.put("ops/garbled", b"{")
    link = ScriptedLink(
        [
            [
                SampleOp("garbled", "base", "ops/garbled", 1),
                SampleOp("bodiless", "base", "ops/none", 1),
                SampleOp("elsewhere", "other-model", "ops/none", 1),
                put_op(blobs, "unadapted", adapter_ref="samplers/gone"),
                put_op(blobs, "good"),
            ]
        ]
    )
    generator(decoder, blobs, link, slots=8).serve()
    failures = {message.op_id: message.failure for message in link.of(Done)}
    assert failures.pop("good") is None
    assert set(failures) == {"garbled", "bodiless", "elsewhere", "unadapted"}
    assert all(failures.values())
    assert failures["unadapted"].category == "user"
    assert str(blobs.root) not in "".join(failure.message for failure in failures.values())


def test_cancel_answers_with_what_there_is(decoder: Decoder, blobs: FolderBlobs) -> None:
    link = ScriptedLink([[put_op(blobs, "a", max_tokens=60)]])
    worker = generator(decoder, blobs, link)
    steps = 0

    def recv(timeout_s: float | None = None) -> Any:
        nonlocal steps
        steps += 1
        return Cancel("a") if steps == 8 else ScriptedLink.recv(link, timeout_s)

    link.recv = recv  # type: ignore[method-assign]
    worker.serve()
    (done,) = link.of(Done)
    assert done.failure is None
    assert 0 < done.facts["sample"] < 60
    assert len(decode_sample_response(done.payload).sequences[0].tokens) == done.facts["sample"]


@pytest.fixture
def adapter_ref(blobs: FolderBlobs) -> str:
    from workers.model.families.read import read_config

    shape = AdapterShape(read_config("tiny", TINY), 4, True, True, True)
    adapter = Adapter.init(shape, seed=0)
    adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(0)), alpha=0.02)
    save_adapter(adapter, blobs.path("samplers/s1"), base_model="base")
    return "samplers/s1"


@pytest.mark.parametrize("goodbye", ["drain", "sigterm", "server-gone"])
def test_the_process(blobs: FolderBlobs, adapter_ref: str, goodbye: str) -> None:
    ops = [put_op(blobs, "plain"), put_op(blobs, "adapted", adapter_ref=adapter_ref, samples=2)]

    async def talk() -> tuple[int, dict[str, Done]]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = Forked("-m", "workers", "generator", "--link-fd", link=theirs)
        link = ServerLink(ours)
        link.send(GeneratorConfig(Basics(str(blobs.root.parent), {"base": str(TINY)}), slots=4))
        done: dict[str, Done] = {}
        async for message in link.messages():
            if isinstance(message, PullSamples) and not done:
                link.send(SampleWork(ops))
            elif isinstance(message, Done):
                done[message.op_id] = message
                if len(done) == len(ops):
                    break
        if goodbye == "drain":
            link.send(Drain())
        elif goodbye == "sigterm":
            process.send_signal(signal.SIGTERM)
        else:
            link.close()
        return await asyncio.to_thread(process.wait, 60), done

    code, done = asyncio.run(talk())
    assert code == (1 if goodbye == "server-gone" else 0)
    assert {op_id: message.failure for op_id, message in done.items()} == {"plain": None, "adapted": None}
    (plain,) = decode_sample_response(done["plain"].payload).sequences
    adapted = decode_sample_response(done["adapted"].payload).sequences
    assert len(plain.tokens) == len(adapted[0].tokens) == len(adapted[1].tokens) == 5
    assert adapted[0].logprobs is not None
    assert all(math.isfinite(logprob) and logprob < 0 for logprob in adapted[0].logprobs)
    assert adapted[0].logprobs.tolist() != plain.logprobs.tolist()  # type: ignore[union-attr]


# -- policies in flight


@pytest.fixture
def policies(decoder: Decoder, blobs: FolderBlobs) -> list[str]:
    """A run's weights at steps 1 and 2."""
    refs = []
    for version in (1, 2):
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=version, scale=2.0)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(version)), alpha=0.05)
        refs.append(f"samplers/{version}")
        with blobs.new_folder(refs[-1]) as folder:
            save_adapter(adapter, folder, base_model="base", details={"step": version})
    return refs


def following(blobs: FolderBlobs, op_id: str, ref: str, max_staleness: int | None = None, **fields: Any) -> SampleOp:
    op = put_op(blobs, op_id, adapter_ref=ref, max_tokens=30)
    body = SampleRequest.model_validate_json(blobs.get(op.body_ref))
    body = body.model_copy(update={"max_staleness": max_staleness})
    blobs.put(op.body_ref, body.model_dump_json(exclude_none=True).encode())
    return msgspec.structs.replace(op, run_id="mine", inflight=True, **fields)


def moving(link: ScriptedLink, at: int, *moves: PolicyMoved) -> None:
    """Let the server say that a policy has moved when the worker listens for the time `at`."""
    calls = 0

    def recv(timeout_s: float | None = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            link.inbox.extend(moves)
        return ScriptedLink.recv(link, timeout_s)

    link.recv = recv  # type: ignore[method-assign]


def spans(done: Done) -> list[tuple[int, int]]:
    (sequence,) = decode_sample_response(done.payload).sequences
    return [(span.version, span.length) for span in sequence.policy]


def test_a_policy_that_moves_takes_inflight_samples_along(
    decoder: Decoder, blobs: FolderBlobs, policies: list[str]
) -> None:
    snapshot = msgspec.structs.replace(put_op(blobs, "s", adapter_ref=policies[0], max_tokens=30), run_id="mine")
    link = ScriptedLink([[following(blobs, "f", policies[0], version=1), snapshot]])
    moving(link, 12, PolicyMoved("mine", 2, policies[1]), PolicyMoved("other", 9, policies[1]))
    generator(decoder, blobs, link).serve()
    done = {message.op_id: message for message in link.of(Done)}
    first, second = spans(done["f"])
    assert (first[0], second[0], first[1] + second[1]) == (1, 2, 30)
    assert 1 < first[1] < 29
    assert spans(done["s"]) == [(1, 30)]


def test_weights_that_cannot_be_read_for_now_delay_a_sample_which_is_then_on_the_newest(
    decoder: Decoder, blobs: FolderBlobs, policies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than it has lives; and its policy moves meanwhile."""
    monkeypatch.setattr("workers.generator.worker.DISK_AGAIN_S", 0.0)
    refusals = iter(range(5))
    snapshot = msgspec.structs.replace(put_op(blobs, "s", adapter_ref=policies[0], max_tokens=30), run_id="mine")
    link = ScriptedLink([[following(blobs, "f", policies[0], version=1), snapshot]], drain=False)
    serving = generator(decoder, blobs, link)

    def refused(folder: Weights) -> AbstractContextManager[Path]:
        if (left := next(refusals, None)) is not None:
            if left == 3:
                link.inbox.append(PolicyMoved("mine", 2, policies[1]))
            raise StoreAway("the server's object store does not answer (Unreachable)")
        return reading(folder)

    send = link.send

    def drained_at_the_end(message: msgspec.Struct) -> None:
        send(message)
        if len(link.of(Done)) + len(link.of(Declined)) == 2:
            serving.drain()

    monkeypatch.setattr(adapters, "reading", refused)
    monkeypatch.setattr(link, "send", drained_at_the_end)
    serving.serve()
    assert link.of(Declined) == []
    done = {message.op_id: message for message in link.of(Done)}
    assert (spans(done["f"]), spans(done["s"])) == ([(2, 30)], [(1, 30)])
    assert next(refusals, None) is None


def test_a_later_request_brings_newer_weights_of_its_run(
    decoder: Decoder, blobs: FolderBlobs, policies: list[str]
) -> None:
    link = ScriptedLink([[following(blobs, "a", policies[0])], [following(blobs, "b", policies[1])]])
    generator(decoder, blobs, link).serve()
    done = {message.op_id: message for message in link.of(Done)}
    assert spans(done["b"]) == [(2, 30)]


def test_samples_that_are_too_old_end_with_what_they_have(
    decoder: Decoder, blobs: FolderBlobs, policies: list[str]
) -> None:
    link = ScriptedLink([[following(blobs, "old", policies[0], 1, version=1)]])
    late = following(blobs, "late", policies[0], 1, version=3)
    moving(link, 10, PolicyMoved("mine", 3), SampleWork([late]))
    generator(decoder, blobs, link).serve()
    done = {message.op_id: message for message in link.of(Done)}
    (old,) = decode_sample_response(done["old"].payload).sequences
    assert (old.stale, old.stop_reason) == (True, "length")
    assert done["old"].facts["sample"] == len(old.tokens)
    assert 1 < len(old.tokens) < 30
    assert done["late"].facts == {"prefill": 0, "cached_prefill": 0, "sample": 0}


def test_weights_that_are_gone_fail_new_requests_and_leave_running_ones(
    decoder: Decoder, blobs: FolderBlobs, policies: list[str]
) -> None:
    link = ScriptedLink([[following(blobs, "a", policies[0])]])
    moving(link, 8, PolicyMoved("mine", 2, "samplers/gone"), SampleWork([following(blobs, "b", "samplers/gone")]))
    generator(decoder, blobs, link).serve()
    done = {message.op_id: message for message in link.of(Done)}
    assert spans(done["a"]) == [(1, 30)]
    assert done["b"].failure is not None
    assert done["b"].failure.category == "user"
