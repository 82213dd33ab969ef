"""Environments: tasks, and how rollouts of a task are made. `function` and `prompts` need no other package."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.rl import checks
from weft.rl.chat.chat import Chat, Reply, answers_together, is_fatal
from weft.rl.chat.render import Tool
from weft.rl.sandboxes.sandbox import Sandboxes, opened
from weft.rl.signal.advantages import Advantage
from weft.rl.signal.lengths import Size

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Reward:
    """The reward that a rollout earned, and other numbers worth a curve."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


#: The outcome of a rollout: its reward, or the error because of which it has none.
Outcome = Reward | BaseException


class Environment(Protocol):
    """Tasks, and how to try one several times at once."""

    tasks: Sequence[Any]
    #: The expected tokens and turns of a rollout, for `estimate`.
    expected: Size | None
    #: Replaces the loop's advantage, in a mixture of environments.
    advantage: Advantage | None

    async def group(self, task: Any, chats: Sequence[Chat]) -> list[Outcome]:
        """One outcome for each chat, in their order."""
        ...


Solve = Callable[..., Awaitable[Any]]

#: A rollout's time limit is counted in this many pieces. However long this process stands still (another rollout's
#: reward computes, the machine sleeps), only one piece passes.
PIECES = 60


@dataclass
class Function:
    """`async solve(task, chat)`: any code that talks to the policy through `chat` and returns a reward. With
    `sandboxes` it is `solve(task, chat, sandbox)`, and each rollout has a sandbox of its own, closed when it ends."""

    solve: Solve
    tasks: Sequence[Any]
    tools: Sequence[Tool] = ()
    timeout_s: float | None = None
    sandboxes: Sandboxes | None = None
    expected: Size | None = None
    advantage: Advantage | None = None

    def __post_init__(self) -> None:
        checks.tasks(self.tasks)
        checks.function("solve", self.solve, "async def solve(task, chat)")
        _check_hints(self.expected, self.advantage)
        if self.timeout_s is not None:
            checks.number("timeout_s", self.timeout_s, above=True)

    async def group(self, task: Any, chats: Sequence[Chat]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._one(task, chat) for chat in chats)))

    async def _one(self, task: Any, chat: Chat) -> Outcome:
        chat.tools, earned = list(self.tools), None
        try:
            async with _within(self.timeout_s) as limit:
                if self.sandboxes is None:
                    earned = await _solved(self.solve(task, chat), limit)
                else:
                    async with opened(self.sandboxes) as sandbox:
                        earned = await _solved(self.solve(task, chat, sandbox), limit)
            return earned
        except TimeoutError as error:
            if earned is not None:
                logger.warning(
                    "a sandbox was not closed by the end of timeout_s (%s s), and goes on until its provider ends it",
                    self.timeout_s,
                )
                return earned
            if not limit.expired():  # the TimeoutError came from something that solve waited for
                return error
            return TimeoutError(
                f"solve took longer than {self.timeout_s} s, after {chat.turns} turns; what samples wait at the"
                " server counts: a larger timeout_s, or fewer groups at a time (concurrency=rl.Concurrency())"
            )
        # an error of this rollout alone: the group is trained without it
        except (Exception, asyncio.CancelledError) as error:
            return own(error)


async def _solved(solving: Any, limit: asyncio.Timeout) -> Reward:
    if not inspect.isawaitable(solving):
        raise TypeError(f"solve must be an async function (async def solve(task, chat)); it returned {solving!r:.80}")
    found = await solving
    if limit.expired():  # solve caught the cancellation at the time limit, and went on
        raise TimeoutError
    return reward_of(found)


def own(error: Exception | asyncio.CancelledError) -> Exception:
    """The error that ended a rollout. A cancellation becomes a RuntimeError if only something that the rollout's code
    waited for was cancelled; it is raised if the rollout itself was cancelled."""
    if isinstance(error, Exception):
        return error
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    return RuntimeError("something that the rollout waited for was cancelled, and its code does not catch that")


@asynccontextmanager
async def _within(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, counting only time in which this process runs."""

    async def lapse(seconds: float) -> None:
        for _ in range(PIECES):
            await asyncio.sleep(seconds / PIECES)
        limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as limit:
        lapsing = asyncio.ensure_future(lapse(timeout_s)) if timeout_s is not None else None
        try:
            yield limit
        finally:
            if lapsing is not None:
                lapsing.cancel()


def function(
    solve: Solve,
    tasks: Sequence[Any],
    *,
    tools: Sequence[Tool] = (),
    timeout_s: float | None = None,
    sandboxes: Sandboxes | None = None,
    expected: Size | None = None,
    advantage: Advantage | None = None,
) -> Function:
    """An environment of one's own code. `tools` are the JSON schemas that the chat template shows the model.
    `timeout_s` limits one rollout by the wall clock, including its waits for samples and for a sandbox."""
    return Function(solve, tasks, tools, timeout_s, sandboxes, expected, advantage)


@dataclass
class Prompts:
    """One question, one answer, one reward: a group is one request, and its prompt is computed once."""

    tasks: Sequence[Any]
    reward: Callable[[str, Any], Any]
    messages: Callable[[Any], Sequence[Mapping[str, Any]]]
    max_tokens: int | None = None
    stop: Any = None
    expected: Size | None = None
    advantage: Advantage | None = None

    def __post_init__(self) -> None:
        checks.tasks(self.tasks)
        checks.function("reward", self.reward, "lambda text, task: 1.0")
        _check_hints(self.expected, self.advantage)
        if self.max_tokens is not None:
            checks.count("max_tokens", self.max_tokens)

    async def group(self, task: Any, chats: Sequence[Chat]) -> list[Outcome]:
        for chat in chats:
            chat.add(*self.messages(task))
        answers = await answers_together(chats, self.max_tokens, self.stop)
        return list(await asyncio.gather(*(self._judge(answer, task) for answer in answers)))

    async def _judge(self, answer: Reply | BaseException, task: Any) -> Outcome:
        if isinstance(answer, BaseException):
            return answer
        try:
            found = self.reward(answer.text, task)
            return reward_of(await found if inspect.isawaitable(found) else found)
        except (Exception, asyncio.CancelledError) as error:
            return own(error)


def prompts(
    tasks: Sequence[Any],
    reward: Callable[[str, Any], Any] = lambda text, task: 0.0,
    *,
    prompt: str = "prompt",
    system: str | None = None,
    max_tokens: int | None = None,
    stop: Any = None,
    expected: Size | None = None,
    advantage: Advantage | None = None,
) -> Prompts:
    """Tasks with a prompt (a text, or messages; `task[prompt]`, or the task itself), and `reward(text, task)`."""

    def messages(task: Any) -> Sequence[Mapping[str, Any]]:
        if isinstance(task, Mapping) and prompt not in task:
            raise ValueError(f"a task has no {prompt!r}: name its column (prompt=...), of {list(task)}")
        asked = task[prompt] if isinstance(task, Mapping) else task
        if not isinstance(asked, Iterable) or isinstance(asked, Mapping):
            raise TypeError(f"a prompt must be a text or a list of messages, got {asked!r:.80}")
        given = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        return [{"role": "system", "content": system}, *given] if system else given

    return Prompts(tasks, reward, messages, max_tokens, stop, expected, advantage)


def _check_hints(expected: Any, advantage: Any) -> None:
    checks.made("expected", expected, Size | None, "rl.Size(drawn=500)")
    if advantage is not None:
        checks.function("advantage", advantage, "rl.grpo")


def reward_of(found: Any) -> Reward:
    """The result of `solve` or of a reward function as a `Reward` of plain numbers. Raises if it is no finite
    number."""
    given = found if isinstance(found, Reward) else Reward(found)
    try:
        reward = Reward(_number(given.value), {name: _number(value) for name, value in given.metrics.items()})
    except (TypeError, ValueError):
        raise TypeError(f"a reward is a number or rl.Reward(number, metrics), got {found!r}") from None
    if not math.isfinite(reward.value):
        raise ValueError(f"a reward must be finite, got {reward.value}")
    return reward


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):  # float() would accept these, too
        raise TypeError
    return float(value)


def checked(outcome: Outcome, chat: Chat) -> Outcome:
    """The outcome of one rollout, from any environment. It becomes an error if its reward cannot be learnt from, or if
    a sample of it failed although its code caught that error and returned a reward."""
    if chat.ended:
        return next((error for error in chat.ended if is_fatal(error)), chat.ended[0])
    try:
        return reward_of(outcome) if isinstance(outcome, Reward) else outcome
    except (TypeError, ValueError) as error:
        return error
