"""A run's policy moves while its samples wait and run: from the leader to a real engine, over a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from weft.wire import ModelInput, SampleRequest, SamplingParams
from weft.wire.binary.sample_codec import decode_sample_response

import workers.model.tiny
from scheduler.cluster import policy_desk
from scheduler.links.broadcasts import Listener
from scheduler.links.contract import Item
from scheduler.links.large_results import parcel_of, whole
from scheduler.links.messages import Done, PolicyMoved, SampleOp, SampleWork
from scheduler.links.policies import Followed, PolicyBoard
from scheduler.links.redis_queue import RedisQueue
from scheduler.links.sample_link import SampleLink
from store.blobs.folder import FolderBlobs
from tests.waiting import until
from workers.generator.torch_engine import TorchEngine
from workers.generator.worker import Generator
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder

TOKENS = 40


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(Path(workers.model.tiny.__file__).parent / "weights", torch.float32, torch.device("cpu"))


@pytest.fixture
def board(url: str) -> Iterator[PolicyBoard]:
    made = PolicyBoard(url)
    yield made
    made.close()


@pytest.fixture
def weights(decoder: Decoder, blobs: FolderBlobs) -> list[str]:
    """The weights of a run at steps 1 and 2."""
    refs = ["weights/1", "weights/2"]
    for step, ref in enumerate(refs, 1):
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=step, scale=2.0)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(step)), alpha=0.05)
        with blobs.new_folder(ref) as folder:
            save_adapter(adapter, folder, base_model="m", details={"step": step})
    return refs


class OnTheWay(SampleLink):
    """A generator's link; after some steps of its engine `meanwhile` is called, whose news come before it goes on."""

    def __init__(self, url: str, blobs: FolderBlobs, samples: int) -> None:
        super().__init__(url, blobs)
        assert self._listener.connected.wait(10)
        self.left, self._steps = samples, -1
        self.meanwhile = lambda: None
        self.all_done = lambda: None

    def recv(self, timeout_s: float | None = None) -> Any:
        if self._steps >= 0:
            self._steps += 1
        if self._steps == 24:
            self.meanwhile()
            deadline = time.monotonic() + 30
            while self._told.empty() and not self._missed.is_set() and time.monotonic() < deadline:
                time.sleep(0.01)
        message = super().recv(timeout_s)
        if isinstance(message, SampleWork):
            self._steps = max(0, self._steps)
        return message

    def send(self, message: Any) -> None:
        super().send(message)
        self.left -= isinstance(message, Done)
        if not self.left:
            self.all_done()


def push(
    queue: RedisQueue, blobs: FolderBlobs, name: str, ref: str, *, inflight: bool, max_staleness: int | None
) -> None:
    sampling = SamplingParams.model_validate({"stop": [], "max_tokens": TOKENS, "seed": 0})
    prompt = ModelInput.from_ints([20, 30, 40])
    body = SampleRequest(prompt=prompt, sampling_params=sampling, num_samples=1, max_staleness=max_staleness)
    blobs.put(f"ops/{name}", body.model_dump_json(exclude_none=True).encode())
    op = SampleOp(name, "m", f"ops/{name}", 1, ref, run_id="run", inflight=inflight)
    queue.push(Item(name, ("m", "org", "interactive", name), 10, msgspec.msgpack.encode(op)))


@pytest.mark.parametrize("deaf", [False, True], ids=["told", "told in a gap"])
def test_running_samples_follow_their_run_or_end(
    url: str, board: PolicyBoard, decoder: Decoder, blobs: FolderBlobs, weights: list[str], deaf: bool
) -> None:
    queue = RedisQueue(url)
    queue.answered("c", 0.01)
    push(queue, blobs, "follows", "weights/none", inflight=True, max_staleness=None)
    push(queue, blobs, "strict", weights[0], inflight=False, max_staleness=0)
    push(queue, blobs, "loose", weights[0], inflight=False, max_staleness=1)
    board.tell([PolicyMoved("run", 1, weights[0], 3)])
    link = OnTheWay(url, blobs, 3)
    generator = Generator({"m": TorchEngine(decoder, (), slots=4, context=64)}, blobs, link, slots=4)
    link.all_done = generator.drain

    def move() -> None:
        if deaf:  # the news does not arrive; then the listener notices that it was cut off
            board._redis.hset("{weft:policies}", "run", b"5 " + msgspec.msgpack.encode(moved))
            link._missed.set()
        else:
            board.tell([moved])

    moved = PolicyMoved("run", 2, weights[1], 5)
    link.meanwhile = move
    generator.serve()
    link.close()
    found = {}
    while len(found) < 3:
        for answer in queue.answered("c", 5):
            done = whole(parcel_of(answer.result), blobs)[0]
            assert isinstance(done, Done)
            (found[answer.id],) = decode_sample_response(done.payload).sequences
    queue.close()
    versions = {name: [(span.version, span.length) for span in one.policy] for name, one in found.items()}
    (_, before), (_, after) = versions["follows"]
    assert [version for version, _ in versions["follows"]] == [1, 2]
    assert before + after == TOKENS
    assert versions["loose"] == [(1, TOKENS)]
    assert found["strict"].stale
    ((version, length),) = versions["strict"]
    assert version == 1
    assert length <= before  # it ends at once; the other uses older weights until the new ones have been read


def test_no_sample_goes_back_to_an_earlier_policy(board: PolicyBoard) -> None:
    late, newer = PolicyMoved("run", 7, "weights/7", 20), PolicyMoved("run", 8, "weights/7", 21)
    after_a_load = PolicyMoved("run", 2, "weights/7", 30)
    for moved in (newer, late):
        board.tell([moved])
        assert board.known(["run", "other"]) == {"run": newer}
    board.tell([after_a_load])
    assert board.known(["run"]) == {"run": after_a_load}
    board.forget(["run"])
    assert board.known(["run"]) == {}


def test_of_moves_that_are_told_together_only_those_that_are_new_are_heard(url: str, board: PolicyBoard) -> None:
    heard = list[Any]()
    listener = Listener.of_workers(url, "me", heard.append, lambda: None, lambda: None)
    listener.start()
    assert listener.connected.wait(10)
    board.tell([PolicyMoved("late", 7, "", 20)])
    moves = [PolicyMoved(f"run{number}", number, "", number) for number in range(200)]
    board.tell([*moves[:100], PolicyMoved("late", 6, "", 19), *moves[100:]])
    until(lambda: len(heard) >= 201)
    listener.stop()
    assert heard == [PolicyMoved("late", 7, "", 20), *moves]
    assert board.known(["late", "run199"]) == {"late": heard[0], "run199": moves[-1]}


def test_what_redis_has_lost_is_told_again_however_much_else_moves(
    board: PolicyBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_desk, "LOOK_AGAIN_S", 0.2)
    training = SimpleNamespace(desks=[], runs=dict.fromkeys(("calm", "busy")))

    async def scenario() -> None:
        desk = policy_desk.PolicyDesk(cast(Any, training), board, asyncio.to_thread)
        calm = PolicyMoved("calm", 1, "", 1)

        async def tell() -> None:
            while True:
                await desk.tell()

        async def told() -> None:
            seq = 0
            while board.known(["calm"]) != {"calm": calm}:
                seq += 1
                desk.policy_moved(PolicyMoved("busy", seq, "", seq))
                await asyncio.sleep(0.001)

        telling = asyncio.create_task(tell())
        desk.policy_moved(calm)
        for _ in range(2):
            await asyncio.wait_for(told(), 20)
            board.forget(["calm"])
        telling.cancel()

    asyncio.run(scenario())


def test_a_generator_is_told_what_is_new_of_the_runs_it_samples() -> None:
    followed, second = Followed(), PolicyMoved("run", 2, "weights/2", 5)
    assert not followed.hear(second)
    waited = SampleOp("a", "m", "", 1, "weights/1", run_id="run", inflight=True)
    assert followed.hold(waited, None) == waited
    assert followed.hear(second)
    assert not followed.hear(second)
    late = followed.hold(msgspec.structs.replace(waited, op_id="b"), PolicyMoved("run", 1, "weights/1", 4))
    assert (late.adapter_ref, late.version) == ("weights/2", 2)
    snapshot = followed.hold(msgspec.structs.replace(waited, op_id="c", inflight=False), None)
    assert (snapshot.adapter_ref, snapshot.version) == ("weights/1", 2)
    for op_id in "ab":
        followed.drop(op_id)
    assert followed.runs == {"run"}
    followed.drop("c")
    assert not followed.hear(PolicyMoved("run", 3, "", 6))
