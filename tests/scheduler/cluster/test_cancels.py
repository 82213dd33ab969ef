"""A sample is cancelled from any replica, as long as it waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from weft.wire.binary.sample_codec import decode_sample_response

from scheduler.cluster import cancels
from scheduler.links.contract import QueueUnreachable
from scheduler.links.large_results import pack
from scheduler.links.messages import Done
from scheduler.links.redis_queue import RedisQueue
from scheduler.order.operations import Outcome, Waiting
from store.blobs.folder import FolderBlobs
from tests.scheduler.cluster.replicas import Play, Replica, sample
from tests.scheduler.jobs.proxy import Proxy, proxy
from tests.waiting import until_async


def test_a_waiting_sample_is_cancelled_from_any_replica(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until_async(lambda: one.queue.known([request_id]))
        assert isinstance(await two.result(request_id, 0), Waiting)
        assert await one.journal.outcome("other", request_id, 0) is None
        assert not await two.journal.cancel("other", request_id)
        with two.journal._waiters.on(request_id) as waiting:
            assert await two.journal.outcome("other", request_id, 0) is None
            assert await two.journal.cancel("org", request_id)
            await until_async(lambda: waiting.told)
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
        await until_async(lambda: one.queue.known([request_id]))
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
        await until_async(lambda: one.queue.known([request_id]))
        (lease,) = one.queue.lease("w", ["m"], 2, 60)
        assert await two.journal.cancel("org", request_id)
        await two.journal.flush()
        assert isinstance(await two.result(request_id, 0), Waiting)
        one.queue.answer(lease.id, lease.epoch, pack(Done(request_id, b"tokens", {"prefill": 5, "sample": 4}), blobs))
        assert (await one.result(request_id)).payload == b"tokens"

    play(scenario)
