"""`distill`: on-policy distillation. The policy samples, a teacher scores every token that was drawn.

The reward of a token is what the teacher's logprob has more than the policy's: its sum over a rollout is, in the mean,
minus the reverse KL. No environment judges anything, so any prompts do. The teacher may be another base model with the
same vocabulary, a checkpoint, or the policy itself that has read a hint (`hint`: self-distillation).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.rl import checks
from weft.rl.chat.render import Message
from weft.rl.envs.environment import Environment
from weft.rl.loops import money
from weft.rl.loops.batch import Batch, denominator
from weft.rl.loops.ending import to_end
from weft.rl.loops.limits import sampler_limits
from weft.rl.loops.report import Report
from weft.rl.loops.train import Loop, Recipe
from weft.rl.losses.loss import OF_ROLLOUTS, Loss
from weft.rl.rollout import data_of
from weft.rl.signal.advantages import reinforce
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.wire.inputs import Datum, ModelInput

logger = logging.getLogger("weft")


def distill(
    run: TrainingClient,
    env: Environment | Mapping[str, Environment],
    teacher: SamplingClient,
    *,
    hint: Callable[[Any], Sequence[Message]] | None = None,
    **recipe: Any,
) -> Report:
    """`train` with the teacher's opinion in place of rewards; the other arguments are `train`'s, but `advantage` and
    `penalty`.

    Losses that read `ref` (`rl.losses.ref_kl()`) get the teacher's logprobs; for the others each token's advantage is
    ref - q. `hint(task)` are messages that only the teacher reads, before the conversation.
    """
    return to_end(distill_async(run, env, teacher, hint=hint, **recipe), "rl.distill_async")


async def distill_async(
    run: TrainingClient,
    env: Environment | Mapping[str, Environment],
    teacher: SamplingClient,
    *,
    hint: Callable[[Any], Sequence[Message]] | None = None,
    **recipe: Any,
) -> Report:
    """`distill`, in an event loop of one's own."""
    for name in ("advantage", "penalty"):
        if name in recipe:
            raise ValueError(f"{name}: a teacher's opinion is trained in place of rewards; leave it out, or rl.train")
    return await _Distill(run, env, checks.recipe(Recipe, {"advantage": reinforce, **recipe}), teacher, hint).go()


class _Distill(Loop):
    _has = OF_ROLLOUTS | {"ref"}

    def __init__(
        self,
        run: TrainingClient,
        env: Environment | Mapping[str, Environment],
        recipe: Recipe,
        teacher: SamplingClient,
        hint: Callable[[Any], Sequence[Message]] | None,
    ) -> None:
        if recipe.sampling is not None:
            _as_the_teacher(recipe.sampling.temperature)
        if hint is not None:
            checks.function("hint", hint, "lambda task: [{'role': 'system', 'content': ...}]")
        checks.does("teacher", teacher, "get_base_model_async", "service.create_sampling_client(...)")
        super().__init__(run, env, recipe)
        self.teacher, self.hint = teacher, hint
        self._gaps: list[float] = []
        self._too_long = 0

    async def go(self) -> Report:
        self.prices = await money.prices_of(self.teacher)
        self._context = (await sampler_limits(self.teacher)).context_length
        return await super().go()

    async def _data(self, batch: Batch) -> list[Datum]:
        rollouts = [(group.task, rollout) for group in batch.groups for rollout in group.rollouts]
        for turn in (turn for _, rollout in rollouts for turn in rollout.turns):
            _as_the_teacher(turn.temperature)
        pairs = [(task, datum) for task, rollout in rollouts for datum in data_of(rollout, 1.0)]
        pairs = self._readable(pairs)
        scored = await asyncio.gather(*(self._score(task, datum) for task, datum in pairs))
        data = [datum for _, datum in pairs]
        gaps = sum(float(gap.sum()) for _, gap in scored)
        self._gaps.append(-gaps / denominator(data, "tokens"))
        whole = denominator(data, self.recipe.reduce)
        return [_taught(self.loss, datum, ref, gap, 1 / whole) for datum, (ref, gap) in zip(data, scored, strict=True)]

    def _readable(self, pairs: list[tuple[Any, Datum]]) -> list[tuple[Any, Datum]]:
        """The pairs that, with the hint, fit into the teacher's context; the others are left out, counted and, the
        first time, logged."""
        lengths = [len(self._hint_ids(task)) + datum.model_input.length + 1 for task, datum in pairs]
        before, self._too_long = self._too_long, sum(length > self._context for length in lengths)
        if self._too_long and not before:
            logger.warning(
                "the teacher takes %d tokens, and a rollout with its hint has %d: such rollouts are left out"
                " (`too_long_for_teacher` counts them); a smaller max_tokens or a shorter hint keeps them",
                self._context,
                max(lengths),
            )
        return [pair for pair, length in zip(pairs, lengths, strict=True) if length <= self._context]

    async def _score(self, task: Any, datum: Datum) -> tuple[Any, Any]:
        """The teacher's logprob of each target and, where the token was drawn, how far it is above the policy's."""
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        before = self._hint_ids(task)
        whole = [*before, *datum.model_input.to_ints(), int(targets[-1])]
        self.purse.pay(self.prices.price(prefill=len(whole), sample=1), elsewhere=True)
        logprobs = await self.teacher.compute_logprobs_async(ModelInput.from_ints(whole), len(targets))
        ref = np.asarray([lp or 0.0 for lp in logprobs[-len(targets) :]], np.float32)
        mask: Any = datum.loss_fn_inputs["mask"].to_numpy()
        q: Any = datum.loss_fn_inputs["logprobs"].to_numpy()
        return ref * mask, (ref - q) * mask

    def _hint_ids(self, task: Any) -> list[int]:
        if self.hint is None:
            return []
        said = self.hint(task)
        if not isinstance(said, list | tuple) or not all(isinstance(each, Mapping) for each in said):
            raise TypeError(f"hint must return a list of messages, got {said!r:.80}")
        return self.rollouts.policy.renderer.render_ids(list(said))

    def _numbers(self) -> dict[str, float]:
        numbers = {"reverse_kl": self._gaps[-1]} if self._gaps else {}
        return numbers | ({"too_long_for_teacher": float(self._too_long)} if self._too_long else {})


def _as_the_teacher(temperature: float) -> None:
    if temperature != 1:
        raise ValueError(
            f"a teacher's logprobs are those at temperature 1; the policy would draw at {temperature}: leave it out"
        )


def _taught(loss: Loss, datum: Datum, ref: Any, gap: Any, weight: float) -> Datum:
    inputs = {**datum.loss_fn_inputs, "advantages": gap}
    return loss.datum(replace(datum, loss_fn_inputs=inputs), weight, ref=ref)
