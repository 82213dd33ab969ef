"""`Rollouts`: groups under way, as the schedule allows; batches of those that are worth training on.

    async with Rollouts(run, env, groups=Groups(batch=16, size=8), schedule=Async(max_lag=1)) as rollouts:
        batch = await rollouts.batch()
        ...                                      # forward_backward of batch.data(...), optim_step
        await rollouts.step(update)              # the one place where the version moves

Groups start by themselves, also while a batch is in training, whenever the pacer has room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from weft.errors import RateLimitError, WeftError
from weft.rl import checks
from weft.rl.chat.chat import Chat, Policy, StaleError, is_fatal, stops_of
from weft.rl.chat.purse import Purse
from weft.rl.chat.render import Renderer, TemplateRenderer
from weft.rl.envs.environment import Environment, Reward, checked, own
from weft.rl.loops.batch import Batch
from weft.rl.loops.failures import Failures, InARow
from weft.rl.loops.limits import model_limits, on_policy
from weft.rl.loops.mixture import Tries, Try, mixture
from weft.rl.rollout import Group, Rollout
from weft.rl.sandboxes.sandbox import Sandboxes, require
from weft.rl.schedule.concurrency import Concurrency
from weft.rl.schedule.pacer import Pacer
from weft.rl.schedule.schedules import Partial, Schedule, Sync
from weft.rl.signal.filters import GroupFilter, RolloutFilter
from weft.rl.tasks.sources import Source
from weft.training_client import TrainingClient
from weft.wire.sampling import SamplingParams
from weft.wire.weights import SamplingClientKind

logger = logging.getLogger("weft")

#: How often, and over which time at most, the server is asked how long samples wait (for `concurrency`).
LOOK_S, WINDOW_S = 1.0, 10.0


@dataclass(frozen=True)
class Groups:
    """How many rollouts a step has: `batch` groups of `size`. Groups that a filter rejects are not trained; with
    `refill` other groups take their places, else the batch is smaller."""

    batch: int = 16
    size: int = 8
    keep: Sequence[GroupFilter] = ()
    keep_rollout: Sequence[RolloutFilter] = ()
    refill: bool = False

    def __post_init__(self) -> None:
        checks.count("batch", self.batch)
        checks.count("size", self.size)
        checks.functions("keep", self.keep)
        checks.functions("keep_rollout", self.keep_rollout)
        checks.flag("refill", self.refill)


class Rollouts:
    """The rollouts of one run, started by `async with`. `state_dict` holds the version and the tasks to try next."""

    def __init__(
        self,
        run: TrainingClient,
        env: Environment | Mapping[str, Environment],
        *,
        groups: Groups | None = None,
        schedule: Schedule | None = None,
        sources: Source | Mapping[str, Source] | None = None,
        ratios: Mapping[str, float] | None = None,
        sampling: SamplingParams | None = None,
        renderer: Renderer | None = None,
        routing_replay: bool = False,
        concurrency: Concurrency | None = None,
        purse: Purse | None = None,
        seed: int = 0,
        batches: int | None = None,
    ) -> None:
        """`batches`: how many batches will be taken, so that nothing is sampled beyond the last. `routing_replay`:
        training sends each token to the experts that it was sampled with, if the base model is a mixture of experts."""
        self.run, self.groups, self.schedule = run, groups or Groups(), schedule or Sync()
        self.sampling = on_policy(sampling or SamplingParams())
        self.pacer = Pacer(self.schedule, self.groups.batch)
        self.waste: Counter[str] = Counter()
        self._envs = mixture(env, sources, seed)
        self._next = Tries(self._envs, ratios)
        self._renderer, self._concurrency, self._seed = renderer, concurrency, seed
        self._replay = routing_replay
        self._purse = purse or Purse({})
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tried: dict[int, Try] = {}
        self._ready: dict[int, Group] = {}
        self._training = list[int]()
        self._chats: dict[int, list[Chat]] = {}
        self._base: int | None = None
        self._left = batches
        self._cut_at = 0  # the newest group at the last refusal of a sample
        self._told, self._in_a_row = Failures(), InARow(self.groups.batch)
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Rollouts:
        for each in self._envs.values():
            if (sandboxes := getattr(each.env, "sandboxes", None)) is not None:
                await require(sandboxes, self.most_of(sandboxes))
        self._kind: SamplingClientKind = "inflight" if self.schedule.inflight else "snapshot"
        sampler = await self.run.save_weights_and_get_sampling_client_async(kind=self._kind)
        if self._renderer is None:
            self._renderer = TemplateRenderer(await asyncio.to_thread(self.run.get_tokenizer))
        limits, lag = await model_limits(self.run), self.schedule.max_lag or None
        if self._replay and limits.num_experts == 0:
            raise ValueError("routing_replay: the base model has no experts to replay; leave it out")
        stop = stops_of(self._renderer, limits)
        self.policy = Policy(
            sampler, self._renderer, limits.context_length, lag, self._replay, purse=self._purse, stop=stop
        )
        if self._concurrency is not None:
            self._looking = asyncio.ensure_future(self._look(self._concurrency))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._end()

    async def _end(self) -> None:
        """Cancel everything under way. A checkpoint saved afterwards lists these tasks as unfinished, so that a later
        life tries them again."""
        tried, under_way = dict(self._tried), list(self._tasks)
        await self._cancel(under_way)
        self._tried = tried
        for number in under_way:
            self.pacer.drop(number)

    @property
    def _most_groups(self) -> int:
        """How many groups may be under way at a time."""
        return min(self.pacer.capacity, self._concurrency.most if self._concurrency else self.pacer.capacity)

    def most_of(self, sandboxes: Sandboxes) -> int:
        """How many of `sandboxes` rollouts may hold at a time."""
        held = any(getattr(each.env, "sandboxes", None) is sandboxes for each in self._envs.values())
        return self._most_groups * self.groups.size if held else 0

    async def _look(self, concurrency: Concurrency) -> None:
        """Keep telling `concurrency` which share of their time samples wait. A new limit is judged only once all groups
        have ended that were under way when it changed."""
        rest, run_id = self.run.create_rest_client(), (await self.run.get_info_async()).model_id
        limit, before, since = concurrency.limit, set[int](), time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            if concurrency.limit != limit:
                limit, before = concurrency.limit, set(self._tasks)
            if before & self._tasks.keys():
                since = time.monotonic()
            window_s = min(time.monotonic() - since, WINDOW_S)
            if window_s < 1:
                continue
            try:
                waits = (await rest.get_run_health(run_id, window_s)).sampling_wait
            except WeftError as error:
                logger.debug("how long samples wait was not told: %s", error)
                continue
            if waits is not None:
                concurrency.observe(self.pacer.flying, running=1 - waits, waiting=waits)
                self._news.set()

    async def batch(self) -> Batch:
        """The next batch, once there is one."""
        if self._left == 0:
            raise ValueError("all batches that were announced are taken: Rollouts(batches=...) says how many there are")
        while True:
            await self._cancel(self.pacer.late())
            self._launch()
            if self._error is not None:
                raise self._error
            taken = self.pacer.take()
            if taken:
                found = [self._ready.pop(number) for number in taken]
                self._training = taken
                self._left = None if self._left is None else self._left - 1
                await self._cancel(self.pacer.late())
                if self._left == 0:
                    await self._end()
                self._launch()
                return Batch(found, self.pacer.version, self._base or 0)
            self._news.clear()
            await self._news.wait()

    async def step(self, update: Awaitable[Any] | None) -> Any:
        """Wait for the optimizer step and move the rollouts to its weights. None: there was nothing to train on."""
        if update is None:
            self._stepped(moved=False)
            return None
        sampler = self.run.save_weights_and_get_sampling_client(kind=self._kind)
        done = await update
        await sampler
        if self._kind == "snapshot":
            self.policy.sampler = sampler
        self._stepped(moved=True)
        self._launch()
        return done

    def _stepped(self, moved: bool) -> None:
        """The batch is trained: only now are its tasks no longer unfinished."""
        self.pacer.stepped(moved)
        for number in self._training:
            self._tried.pop(number, None)
        self._training = []

    def _launch(self) -> None:
        """Start as many groups as there is room for."""
        room = self.pacer.room() if self._error is None and self._left != 0 else 0
        if self._left is not None and not isinstance(self.schedule, Partial):
            room = min(room, self._left * self.pacer.most - self.pacer.flying - self.pacer.ready)
        if self._concurrency is not None:
            room = min(room, self._concurrency.limit - self.pacer.flying)
        for _ in range(room):
            number = self.pacer.start()
            self._tried[number] = tried = self._next.draw()
            self._tasks[number] = asyncio.ensure_future(self._group(number, tried))

    async def _group(self, number: int, tried: Try) -> None:
        """Run one group, from its first sample to its rewards."""
        try:
            found = await self._roll(number, tried)
        except (Exception, asyncio.CancelledError) as cause:
            error = own(cause)
            self._tasks.pop(number, None)
            if not is_fatal(error):  # a fatal error ends this life: the next one tries the task again
                self._tried.pop(number, None)
            self._count("failed_tokens", _drawn(self._chats.get(number, ())))
            self.pacer.drop(number)
            self._failure(number, error, tried)
        else:
            self._tasks.pop(number, None)
            try:
                self._ended(number, found)
            except Exception as error:  # an error of a filter or a source, which every further group would meet
                self._error = error
        finally:
            self._chats.pop(number, None)
        self._news.set()

    async def _roll(self, number: int, tried: Try) -> Group:
        env, seed = self._envs[tried.name].env, f"{self._seed}/{tried.number}"
        chats = [Chat(self.policy, f"{seed}/{each}", params=self.sampling) for each in range(self.groups.size)]
        self._chats[number] = chats
        task = env.tasks[tried.index]
        watching = self._watch(number, chats)
        try:
            outcomes = await env.group(task, chats)
        finally:
            watching.cancel()
        rollouts, failed, refused = [], list[Chat](), None
        for chat, found in zip(chats, outcomes, strict=True):
            outcome = checked(found, chat)
            if isinstance(outcome, Reward):
                rollouts.append(Rollout(chat.recorded, outcome.value, dict(outcome.metrics)))
            elif is_fatal(outcome):
                raise outcome
            else:
                self.waste["failed_rollouts"] += 1
                failed.append(chat)
                last = outcome
                refused = outcome if isinstance(outcome, RateLimitError) else refused
                self._told.tell(outcome)
        if not rollouts:
            raise refused or last
        if refused is not None:
            self._refused(number)
        if failed:
            self._count("failed_tokens", _drawn(failed))
        return Group(task, rollouts, tried.name, tried.index)

    def _watch(self, number: int, chats: Sequence[Chat]) -> asyncio.Task[None]:
        """Tell the pacer how many tokens a group has drawn, for schedules with a budget of generated tokens."""

        async def look() -> None:
            told = 0
            while True:
                await asyncio.sleep(0.2)
                if (drawn := _drawn(chats)) != told:
                    told = drawn
                    self.pacer.progress(number, drawn)
                    self._news.set()

        return asyncio.ensure_future(look())

    def _ended(self, number: int, group: Group) -> None:
        """A group is complete: tell its source, filter it, and hand it to the pacer."""
        self._in_a_row.rolled()
        self._envs[group.source].source.observe(group.index, group.mean)
        oldest = group.oldest
        if self._base is None and oldest is not None:
            self._base = oldest - self.pacer.version
        drawn, rewards = group.sampled, group.rewards
        group.rollouts = [
            rollout for rollout in group.rollouts if all(keep(rollout) for keep in self.groups.keep_rollout)
        ]
        rejected = next((_name_of(keep) for keep in self.groups.keep if group.rollouts and not keep(group)), None)
        if rejected is not None or not group.rollouts:
            self._in_a_row.rejected(rejected or "keep_rollout", rewards)
            self._count(f"rejected_tokens/{rejected or 'keep_rollout'}", drawn)
            if self.groups.refill:
                self.pacer.drop(number)
                self._tried.pop(number, None)
                return
            group.rollouts = []
        else:
            self._in_a_row.kept()
            if len(group.rollouts) < len(rewards):
                self._count("rejected_tokens/keep_rollout", drawn - group.sampled)
        self._ready[number] = group
        self.pacer.finish(number, drawn, None if oldest is None else oldest - (self._base or 0))

    def _refused(self, number: int) -> None:
        """Tell `concurrency` that the server refused a sample of this group (429), once for all groups that were under
        way then: they had begun under the old limit."""
        if self._concurrency is not None and number > self._cut_at:
            self._concurrency.refused()
            self._cut_at = max(number, *self._tasks)

    def _failure(self, number: int, error: Exception, tried: Try) -> None:
        """Count and log a group without any good rollout."""
        if isinstance(error, StaleError):
            return
        if isinstance(error, RateLimitError):
            self._refused(number)
        self.waste["failed_groups"] += 1
        which = f"a group of tasks[{tried.index}]" + (f" of {tried.name!r}" if tried.name else "")
        self._error = self._in_a_row.failed(error, which) or self._error

    async def _cancel(self, numbers: Sequence[int]) -> None:
        """Stop groups that can no longer be trained, and count their tokens as waste."""
        for number in numbers:
            self._tried.pop(number, None)
            ready = self._ready.pop(number, None)
            self._count("late_tokens", _drawn(self._chats.get(number, ())) if ready is None else ready.sampled)
        tasks = [task for number in numbers if (task := self._tasks.pop(number, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self, why: str, tokens: int) -> None:
        """Count tokens that are paid for and not trained on."""
        self.waste[why] += tokens
        self.waste["nusd"] += self._purse.price(sample=tokens)

    def metrics(self) -> dict[str, float]:
        """The metrics of all task sources and of the schedule."""
        found = {"in_flight": float(self.pacer.flying), "late_groups": float(self.pacer.late_groups)}
        if self._concurrency is not None:
            found["in_flight/limit"] = float(self._concurrency.limit)
        for name, each in self._envs.items():
            found |= {f"{name}/{key}" if name else key: value for key, value in each.source.metrics().items()}
        found["waste_usd"] = self.waste["nusd"] / 10**9
        return found | {f"waste/{name}": float(count) for name, count in self.waste.items() if name != "nusd"}

    def state_dict(self) -> dict[str, Any]:
        """The state. Tasks under way, or in a batch without a finished step, will be tried again."""
        return {"pacer": self.pacer.state_dict(), **self._next.state_dict(self._tried.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pacer.load_state_dict(state["pacer"])
        self._next.load_state_dict(state)


def _drawn(chats: Sequence[Chat]) -> int:
    """How many tokens these rollouts have drawn so far."""
    return sum(len(turn.tokens) for chat in chats for turn in chat.recorded)


def _name_of(keep: GroupFilter) -> str:
    """The name under which a filter's rejections are counted."""
    return str(getattr(keep, "__name__", type(keep).__name__))
