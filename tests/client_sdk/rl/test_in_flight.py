"""Rollouts under way: how many there may be, with which weights, and that none goes on after the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft import rl
from weft.errors import APIConnectionError, RateLimitError
from weft.rl.loops import rollouts as loop
from weft.wire.account.limits import LimitsResponse, ModelLimits

from tests.client_sdk.rl.kit import Said, Scripted, policy
from tests.client_sdk.rl.test_rollouts import NOBODY, Judge, Run
from tests.client_sdk.rl.test_train import Done, Pupil, Weights, ids


def test_nothing_goes_on_behind_the_end() -> None:
    """Neither rollouts nor the task that watches their progress."""
    told = list[str]()

    async def solve(task: int, chat: rl.Chat) -> float:
        try:
            await asyncio.sleep(30 if task else 0)
        finally:
            told.append(f"{task} ended")
        return 1.0

    async def life() -> None:
        run = cast(Any, Run(policy()[1], None))
        groups, schedule = rl.Groups(batch=1, size=1), rl.Async(max_lag=1)
        concurrency = rl.Concurrency(start=2)
        env = rl.function(solve, [0, 1, 2])
        async with rl.Rollouts(run, env, groups=groups, schedule=schedule, concurrency=concurrency) as rollouts:
            await rollouts.batch()
        told.append("the loop has ended")
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(life())
    assert told[-1] == "the loop has ended"


@pytest.mark.parametrize("schedule", [rl.Partial(tokens=1, in_flight=3), rl.Async(max_lag=2)])
def test_nothing_is_sampled_beyond_the_last_batch(schedule: Any) -> None:
    """What is under way then is paid for, and trains nobody: a later life tries it again."""
    begun = list[int]()

    async def solve(task: int, chat: rl.Chat) -> float:
        begun.append(task)
        await asyncio.sleep(30 if len(begun) > 1 else 0)
        await chat.user("?").sample(max_tokens=4)
        return 1.0

    async def life() -> None:
        run, env = cast(Any, Run(policy("8")[1], None)), rl.function(solve, range(9))
        async with rl.Rollouts(run, env, groups=rl.Groups(1, 1), schedule=schedule, batches=1) as rollouts:
            await rollouts.batch()
            await rollouts.step(None)
            await asyncio.sleep(0)
            assert (rollouts.metrics()["in_flight"], len(asyncio.all_tasks())) == (0, 1)
            again = [index for _, index, _ in rollouts.state_dict()["again"]]
            assert sorted(again) == sorted(begun[1:])
            with pytest.raises(ValueError, match="all batches that were announced are taken"):
                await rollouts.batch()

    asyncio.run(life())


@pytest.mark.parametrize(
    ("schedule", "concurrency", "batches", "begun"),
    [
        (rl.Async(max_lag=3), None, 2, [2, 2]),
        (rl.Async(max_lag=3), None, 9, [4, 4]),
        (rl.Async(max_lag=3), rl.Concurrency(start=2, most=3), 9, [2, 3]),
        (rl.Sync(oversample=3), None, 1, [3, 3]),
    ],
)
def test_as_many_groups_are_begun_as_there_is_room_for(
    schedule: Any, concurrency: Any, batches: int, begun: list[int]
) -> None:
    """`begun` is the number before the first has ended, and the most at a time: so many sandboxes are asked for."""
    boxes, started = cast(Any, object()), list[int]()

    async def solve(task: int, chat: rl.Chat) -> float:
        started.append(task)
        await asyncio.sleep(0.05)
        return 1.0

    async def life() -> int:
        env = rl.function(solve, range(99))
        (boxed := cast(Any, Judge())).sandboxes = boxes
        more: dict[str, Any] = {"schedule": schedule, "concurrency": concurrency, "batches": batches}
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=1, size=1), **more)
        rollouts.policy = policy()[0]
        waiting = asyncio.ensure_future(rollouts.batch())
        await asyncio.sleep(0.02)
        count = len(started)
        await waiting
        await rollouts.__aexit__(None, None, None)
        mixed = rl.Rollouts(NOBODY, {"a": env, "b": boxed}, groups=rl.Groups(batch=1, size=5), **more)
        assert mixed.most_of(cast(Any, object())) == 0
        return count * 1000 + mixed.most_of(boxes)

    assert divmod(asyncio.run(life()), 1000) == (begun[0], (4 if begun == [2, 2] else begun[1]) * 5)


def test_a_limit_is_judged_by_groups_that_began_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were under way when the limit moved have to end first. In a limit's first second nobody is asked."""
    now, ends, windows = [100.0], asyncio.Event(), list[float]()
    monkeypatch.setattr(loop, "LOOK_S", 0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    observed, waits = list[tuple[int, float, float]](), [APIConnectionError("reset"), None, 0.25, 0.5, 0.5]

    class Health(Run):
        async def get_run_health(self, run_id: str, window_s: float) -> Any:
            windows.append(window_s)
            now[0] += 4
            if isinstance(found := waits.pop(0), Exception):
                raise found
            return SimpleNamespace(sampling_wait=found)

    class Told(rl.Concurrency):
        def observe(self, in_flight: int, running: float, waiting: float) -> None:
            observed.append((in_flight, running, waiting))
            self._limit = 3.0

    async def solve(task: int, chat: rl.Chat) -> float:
        await ends.wait()
        return 1.0

    async def spin(later_s: float) -> list[float]:
        now[0] += later_s
        for _ in range(50):
            await asyncio.sleep(0)
        return list(windows)

    async def life() -> None:
        run, env, groups = Health(policy()[1], None), rl.function(solve, range(9)), rl.Groups(batch=1, size=1)
        more: dict[str, Any] = {"schedule": rl.Async(max_lag=3), "concurrency": Told(start=2)}
        async with rl.Rollouts(cast(Any, run), env, groups=groups, **more) as rollouts:
            waiting = asyncio.ensure_future(rollouts.batch())
            assert await spin(0) == []
            assert await spin(0.5) == []
            assert await spin(0.5) == [1.0, 5.0, 9.0]
            assert observed == [(2, 0.75, 0.25)]
            assert await spin(30) == [1.0, 5.0, 9.0]
            assert rollouts.metrics()["in_flight"] == rollouts.metrics()["in_flight/limit"] == 3
            ends.set()
            await spin(0)
            waits[1:] = [None] * 99
            assert (await spin(2))[3:6] == [2.0, 6.0, 10.0]
            assert observed[1][1:] == (0.5, 0.5)
            await waiting

    asyncio.run(life())


@pytest.mark.parametrize(("error", "limit"), [(RateLimitError("too much at once", 429), 2), (KeyError("answer"), 4)])
def test_a_refusal_halves_how_many_are_under_way(error: Exception, limit: int) -> None:
    errors = [error]

    async def solve(task: int, chat: rl.Chat) -> float:
        for each in errors[:1]:
            errors.clear()
            raise each
        return 1.0

    async def life() -> int:
        more: dict[str, Any] = {"schedule": rl.Async(max_lag=3), "concurrency": rl.Concurrency(start=4)}
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(9)), groups=rl.Groups(batch=1, size=1), **more)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            await rollouts.batch()
        return int(rollouts.metrics()["in_flight/limit"])

    assert asyncio.run(life()) == limit


@pytest.mark.parametrize(
    ("size", "refused", "limit"), [(3, [0], 4), (1, [0, 1, 2], 4), (2, [0, 1, 5, 9], 4), (2, [0, 16], 2), (2, [], 8)]
)
def test_what_one_rollout_is_refused_halves_it_once_for_all_that_were_under_way(
    size: int, refused: list[int], limit: int
) -> None:
    """`refused` are samples, in the order in which they begin; 8 groups run at a time."""
    begun, trying = list[int](), asyncio.Event()

    async def solve(task: int, chat: rl.Chat) -> float:
        begun.append(place := len(begun))
        if place == 8 * size - 1:
            trying.set()
        await trying.wait()
        if place in refused:
            raise RateLimitError("too much at once", 429)
        return 1.0

    async def life() -> int:
        more: dict[str, Any] = {"schedule": rl.Async(max_lag=9), "concurrency": rl.Concurrency(start=8)}
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(99)), groups=rl.Groups(batch=4, size=size), **more)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            await rollouts.batch()
            await asyncio.gather(*rollouts._tasks.values())
        return int(rollouts.metrics()["in_flight/limit"])

    assert asyncio.run(life()) == limit


@pytest.mark.parametrize(
    ("schedule", "kind", "oldest"),
    [(rl.Sync(), "snapshot", None), (rl.Async(2), "inflight", 2), (rl.Async(1, inflight=False), "snapshot", 1)],
)
def test_a_schedule_says_which_weights_sample_and_how_old_they_may_be(schedule: Any, kind: str, oldest: Any) -> None:
    kinds = list[str]()

    class Snapshots(Run):
        async def save_weights_and_get_sampling_client_async(self, **kind: str) -> Scripted:
            kinds.append(kind["kind"])
            return self.sampler

        async def get_limits(self) -> LimitsResponse:
            model = ModelLimits(vocab_size=1000, context_length=2048, num_experts=0)
            return LimitsResponse(models={"base": model}, losses={})

    run, groups = cast(Any, Snapshots(policy("8")[1], None)), rl.Groups(batch=1, size=1)

    async def life(**more: Any) -> None:
        env = rl.prompts(["3 + 5"], lambda text, task: 1.0)
        async with rl.Rollouts(run, env, groups=groups, schedule=schedule, batches=1, **more) as rollouts:
            await rollouts.batch()

    asyncio.run(life())
    assert (kinds, run.sampler.more) == ([kind], [{"max_staleness": oldest, "priority": None}])
    with pytest.raises(ValueError, match="routing_replay: the base model has no experts to replay; leave it out"):
        asyncio.run(life(routing_replay=True))


def test_what_is_too_old_by_the_servers_versions_is_not_trained() -> None:
    """Versions are counted on when a life does not begin with the run."""
    said = [Said(ids("8"), version=version) for version in (7, 7, 8)]
    run, updated = Pupil((), ()), Done(None)
    run.sampler = run.later[0] = Weights(*said)

    async def life() -> None:
        env = rl.prompts(["3 + 5"], lambda text, task: 1.0)
        async with rl.Rollouts(cast(Any, run), env, groups=rl.Groups(batch=1, size=1), batches=2) as rollouts:
            state = rollouts.state_dict()
            rollouts.load_state_dict(state | {"pacer": state["pacer"] | {"version": 3}})
            first = await rollouts.batch()
            assert (first.version, first.base, first.lags) == (3, 4, [0])
            await rollouts.step(updated)
            second = await rollouts.batch()
            assert (second.version, second.base, second.lags) == (4, 4, [0])
            assert rollouts.metrics()["late_groups"] == 1

    asyncio.run(life())


def test_a_batch_of_generated_tokens_counts_what_is_under_way() -> None:
    numbers, drawn = iter(range(9)), len(ids("8"))

    async def solve(task: int, chat: rl.Chat) -> float:
        number = next(numbers)
        await asyncio.sleep(30 if number > 1 else 0)
        await chat.user("?").sample()
        await asyncio.sleep(30 * number)
        return 1.0

    async def life() -> int:
        schedule = rl.Partial(tokens=2 * drawn, in_flight=2, budget="generated")
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(9)), groups=rl.Groups(1, 1), schedule=schedule)
        rollouts.policy = policy("8", "8")[0]
        async with asyncio.timeout(10):
            return len((await rollouts.batch()).groups)

    assert asyncio.run(life()) == 1
