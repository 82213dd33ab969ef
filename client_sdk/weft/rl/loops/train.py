"""`train`: reinforcement learning of one run on an environment. Thin over the parts, each of which is usable alone."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from weft.loss_handle import LossHandle
from weft.rl import checks
from weft.rl.chat.chat import Policy
from weft.rl.chat.purse import BudgetSpent
from weft.rl.chat.render import Renderer
from weft.rl.envs.environment import Environment
from weft.rl.loops import money
from weft.rl.loops.alone import alone
from weft.rl.loops.batch import Batch, Reduce
from weft.rl.loops.checkpoint import Checkpoints, advantage_state, load_advantage, tell_resumed
from weft.rl.loops.ending import to_end
from weft.rl.loops.evaluate import Evaluation, Places, evaluate, places
from weft.rl.loops.limits import on_policy
from weft.rl.loops.rate import Rate, params_of
from weft.rl.loops.report import Report, plain
from weft.rl.loops.rollouts import Groups, Rollouts
from weft.rl.loops.sinks import Progress, Sink, close, tell
from weft.rl.losses.loss import OF_ROLLOUTS, Loss, importance_sampling, ppo
from weft.rl.schedule.concurrency import Concurrency
from weft.rl.schedule.schedules import Schedule, Sync
from weft.rl.signal.advantages import Advantage, dr_grpo
from weft.rl.signal.lengths import Penalty
from weft.rl.tasks.sources import Source
from weft.training_client import TrainingClient
from weft.wire.inputs import Datum
from weft.wire.sampling import SamplingParams
from weft.wire.training import AdamParams

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Recipe:
    """All arguments of `train` but the run and the environment."""

    steps: int = 100
    groups: Groups = field(default_factory=Groups)
    advantage: Advantage = dr_grpo
    loss: Loss | None = None
    penalty: Penalty | None = None
    reduce: Reduce = "tokens"
    schedule: Schedule = field(default_factory=Sync)
    learning_rate: float | Rate = 1e-4
    optim: AdamParams = field(default_factory=AdamParams)
    sources: Source | Mapping[str, Source] | None = None
    ratios: Mapping[str, float] | None = None
    sampling: SamplingParams | None = None
    renderer: Renderer | None = None
    routing_replay: bool = False
    concurrency: Concurrency | None = None
    evaluation: Evaluation | None = None
    sinks: Sequence[Sink] | None = None
    checkpoint: Checkpoints | None = None
    budget_usd: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.count("steps", self.steps, least=0)
        checks.function("advantage", self.advantage, "rl.grpo")
        if self.penalty is not None:
            checks.function("penalty", self.penalty, "rl.lengths.linear()")
        checks.made("sampling", self.sampling, SamplingParams | None, "weft.SamplingParams(max_tokens=64)")
        checks.flag("routing_replay", self.routing_replay)
        checks.made("concurrency", self.concurrency, Concurrency | None, "rl.Concurrency()")
        checks.sinks(self.sinks)
        checks.made("optim", self.optim, AdamParams, "weft.AdamParams(beta2=0.95)")
        checks.made("groups", self.groups, Groups, "rl.Groups(batch=16, size=8)")
        checks.made("loss", self.loss, Loss | None, "rl.losses.ppo()")
        checks.made("schedule", self.schedule, Schedule, "rl.Async(max_lag=1)")
        checks.made("evaluation", self.evaluation, Evaluation | None, "rl.Evaluation(env)")
        checks.made("checkpoint", self.checkpoint, Checkpoints | None, "rl.Checkpoints('name')")
        if self.sampling is not None:
            on_policy(self.sampling)
        checks.one_of("reduce", self.reduce, get_args(Reduce))
        checks.rate("learning_rate", self.learning_rate)
        checks.seed(self.seed)
        if self.budget_usd is not None:
            checks.finite("budget_usd", self.budget_usd)

    def chosen_loss(self) -> Loss:
        """The loss, if the user chose none: importance sampling for on-policy data; PPO with a lag, since it bounds the
        effect of old tokens."""
        loss = self.loss or (ppo() if self.schedule.max_lag else importance_sampling())
        if self.schedule.max_lag > 1 and not loss.bounded:
            warnings.warn(
                f"the loss {loss.name!r} bounds no ratio, and tokens may be {self.schedule.max_lag} steps old:"
                " such runs collapse. ppo(), dppo_kl() or icepop() stand it",
                stacklevel=3,
            )
        return loss


def train(run: TrainingClient, env: Environment | Mapping[str, Environment], **recipe: Any) -> Report:
    """Train `run` on `env`, or on a mixture of environments by name; the arguments are `Recipe`'s.

    A step samples `groups`, turns rewards into advantages, and takes one optimizer step on `loss`. Numbers go to the
    run's curves on the server and to `sinks`. With `checkpoint` it goes on where an earlier life of it was saved, and
    with `budget_usd` it ends before more than that is spent, earlier lives included.
    """
    return to_end(train_async(run, env, **recipe), "rl.train_async")


async def train_async(run: TrainingClient, env: Environment | Mapping[str, Environment], **recipe: Any) -> Report:
    """`train`, in an event loop of one's own."""
    return await Loop(run, env, checks.recipe(Recipe, recipe)).go()


class Loop:
    """One life of a training loop. Distillation overrides `_data`, and `_has`: which fields a loss may read of it."""

    _has = OF_ROLLOUTS

    def __init__(self, run: TrainingClient, env: Environment | Mapping[str, Environment], recipe: Recipe) -> None:
        self.run, self.env, self.recipe = run, env, recipe
        self.loss = recipe.chosen_loss()
        if missing := [name for name in self.loss.reads if name not in self._has]:
            raise ValueError(
                f"the loss {self.loss.name!r} reads {missing[0]!r}, which the data of this loop do not have: `ref` is a"
                " teacher's (rl.distill), and a loop of your own may add others (batch.data(..., more=...))"
            )
        self.report = Report()
        self.runs: list[str] = []
        self._sinks = [Progress()] if recipe.sinks is None else list(recipe.sinks)
        self._evaluations: set[asyncio.Task[None]] = set()
        self._places: Places | None = None
        self._saved = 0
        self._began: str | None = None
        self._idle = False

    async def go(self) -> Report:
        """All steps, or as many as the budget allows."""
        with alone(self.run):
            return await self._go()

    async def _go(self) -> Report:
        recipe, rest = self.recipe, self.run.create_rest_client()
        found = await recipe.checkpoint.newest(rest) if recipe.checkpoint else None
        self._began, state = found or (None, dict[str, Any]())
        if self._began is not None:
            await self.run.load_state_with_optimizer(self._began)
            tell_resumed(recipe.checkpoint, self._began, state["step"], recipe.steps)
        earlier = state.get("runs", [])
        self._elsewhere: dict[str, int] = state.get("elsewhere", {})
        self.purse = await money.purse(self.run, recipe.budget_usd, earlier, self._elsewhere)
        self._run_id = (await self.run.get_info_async()).model_id
        self.runs = list(dict.fromkeys([*earlier, self._run_id]))
        making = self.loss.made(self.run)
        handle = await making if making is not None else None
        self.report.resumed_at = self._saved = state.get("step", 0)
        self.rollouts = rollouts = self._rollouts()
        if state:
            rollouts.load_state_dict(state["rollouts"])
            for name, advantage in self._advantages().items():
                load_advantage(advantage, state.get("advantages", {}).get(name))
            load_advantage(recipe.advantage, state.get("advantage"))
        if recipe.budget_usd is not None and recipe.checkpoint is not None and recipe.steps > self._saved:
            await self._save(self._saved, rollouts)  # a life that dies before its next save must still be counted
        try:
            async with rollouts:
                if (evaluation := recipe.evaluation) is not None:
                    sandboxes = getattr(evaluation.env, "sandboxes", None)
                    self._places = await places(evaluation, kept=rollouts.most_of(sandboxes) if sandboxes else 0)
                for step in range(self.report.resumed_at, recipe.steps):
                    await self._step(step, rollouts, handle)
                if evaluation is not None and self.report.steps and recipe.steps % evaluation.every:
                    await self._evaluate(recipe.steps - 1, rollouts.policy, evaluation)
                await self._last(recipe.steps, rollouts)
        except BudgetSpent as why:
            self.report.ended = "budget"
            logger.warning("%s", why)
            await self._last(self.report.resumed_at + len(self.report.steps), rollouts)
        finally:
            for task in self._evaluations:
                task.cancel()
            close(self._sinks)
        self.report.spent_nusd = self.purse.spent_nusd
        return self.report

    def _rollouts(self) -> Rollouts:
        recipe = self.recipe
        return Rollouts(
            self.run,
            self.env,
            groups=recipe.groups,
            schedule=recipe.schedule,
            sources=recipe.sources,
            ratios=recipe.ratios,
            sampling=recipe.sampling,
            renderer=recipe.renderer,
            routing_replay=recipe.routing_replay,
            concurrency=recipe.concurrency,
            purse=self.purse,
            seed=recipe.seed,
            batches=recipe.steps - self.report.resumed_at,
        )

    async def _step(self, step: int, rollouts: Rollouts, handle: LossHandle | None) -> None:
        batch = await rollouts.batch()
        numbers = batch.metrics()
        data = await self._data(batch)
        update = None
        if data:
            self.purse.pay(self._price(data, handle))
            params = params_of(self.recipe.optim, self.recipe.learning_rate, step)
            backward = self.loss.forward_backward(self.run, data, handle)
            update = self.run.optim_step(params)
            done = await rollouts.step(update)
            numbers |= plain((await backward).metrics) | plain(done.metrics or {})
        else:
            self._nothing(step, batch)
            await rollouts.step(None)
        numbers |= self._numbers() | rollouts.metrics()
        numbers |= {"data": float(len(data)), "spent_usd": self.purse.spent_nusd / money.NUSD}
        self._log(step, numbers)
        evaluation = self.recipe.evaluation
        if evaluation is not None and (step + 1) % evaluation.every == 0:
            await self._evaluate(step, rollouts.policy, evaluation)
        checkpoint = self.recipe.checkpoint
        if checkpoint is not None and (step + 1) % checkpoint.every == 0:
            await self._save(step + 1, rollouts)

    def _nothing(self, step: int, batch: Batch) -> None:
        """A step whose batch has nothing to learn from: the first is logged, since all may have the same cause."""
        if self._idle:
            return
        self._idle, rewards = True, [rollout.reward for rollout in batch.rollouts]
        seen = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "every group filtered out"
        if self.recipe.groups.size == 1:
            seen += "; a group of size 1 has no others"
        logger.warning(
            "step %d trains nothing: no rollout earned more or less than the others of its group (%s). Where that"
            " stays, look at the reward function and at how hard the tasks are; `data` counts what is trained",
            step,
            seen,
        )

    async def _data(self, batch: Batch) -> list[Datum]:
        recipe, own = self.recipe, self._advantages()
        return batch.data(recipe.advantage, self.loss, penalty=recipe.penalty, reduce=recipe.reduce, advantages=own)

    def _advantages(self) -> dict[str, Advantage]:
        """The advantages of environments that bring their own."""
        named = self.env if isinstance(self.env, Mapping) else {"": self.env}
        return {name: env.advantage for name, env in named.items() if env.advantage is not None}

    def _numbers(self) -> dict[str, float]:
        """Further metrics of the step: none here, for subclasses to add."""
        return {}

    def _price(self, data: Sequence[Datum], handle: LossHandle | None) -> int:
        """The price of training on `data`, each request rounded up. A traced loss that the client must run itself costs
        a forward pass more."""
        tokens = sum(datum.model_input.length for datum in data)
        twice = handle is not None and handle.loss_id is None
        return self.purse.price(train=tokens, prefill=tokens * twice) + len(data) * (1 + twice)

    async def _evaluate(self, step: int, policy: Policy, evaluation: Evaluation) -> None:
        """Start an evaluation of the present weights, at batch priority: training goes on meanwhile, and goes first."""
        sampler = await self.run.save_weights_and_get_sampling_client_async()
        frozen = Policy(sampler, policy.renderer, policy.context, priority="batch", purse=self.purse, stop=policy.stop)

        async def work() -> None:
            try:
                self._log(step, await evaluate(frozen, evaluation, self.recipe.seed, room=self._places))
            except Exception as error:  # a failed evaluation never ends a run
                logger.warning("the evaluation of step %d failed: %s", step, error)

        task = asyncio.ensure_future(work())
        self._evaluations.add(task)
        task.add_done_callback(self._evaluations.discard)

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        while len(self.report.steps) <= step - self.report.resumed_at:
            self.report.steps.append({})
        self.report.steps[step - self.report.resumed_at] |= numbers
        self.run.log(numbers, step)
        tell(self._sinks, step, self.recipe.steps, numbers)

    async def _save(self, step: int, rollouts: Rollouts) -> None:
        assert self.recipe.checkpoint is not None
        state = {"step": step, "runs": self.runs, "rollouts": rollouts.state_dict()}
        state["elsewhere"] = money.paid_elsewhere(self.purse, self._elsewhere, self._run_id)
        if (remembered := advantage_state(self.recipe.advantage)) is not None:
            state["advantage"] = remembered
        state["advantages"] = {name: advantage_state(each) for name, each in self._advantages().items()}
        await self.recipe.checkpoint.save(self.run, step, state, self._began)
        self._saved = step

    async def _last(self, step: int, rollouts: Rollouts) -> None:
        """Wait for evaluations under way, and save a last checkpoint."""
        await asyncio.gather(*self._evaluations)
        if self.recipe.checkpoint is not None and step > self._saved:
            await self._save(step, rollouts)
