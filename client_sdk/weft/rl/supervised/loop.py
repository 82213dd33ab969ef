"""What `sft` and `dpo` share: batches of fixed data in a fixed order, a budget, curves and checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.future import APIFuture
from weft.rl import checks
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.loops import money
from weft.rl.loops.alone import alone
from weft.rl.loops.checkpoint import Checkpoints, tell_resumed
from weft.rl.loops.limits import model_limits
from weft.rl.loops.rate import Rate, params_of
from weft.rl.loops.report import Report, plain
from weft.rl.loops.sinks import Progress, Sink, close, tell
from weft.rl.tasks.sources import Shuffled
from weft.training_client import TrainingClient
from weft.wire.training import AdamParams

logger = logging.getLogger("weft")

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """How fixed data are trained, in batches of `batch` items. The number of steps is `epochs` epochs, rounded to whole
    batches (half a batch up); a batch cut by the end of an epoch is filled from the next. With fewer items than
    `batch`, every batch has all of them."""

    batch: int = 32
    epochs: float = 1.0
    learning_rate: float | Rate = 1e-4
    optim: AdamParams = field(default_factory=AdamParams)
    sinks: Sequence[Sink] | None = None
    checkpoint: Checkpoints | None = None
    budget_usd: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.count("batch", self.batch)
        checks.sinks(self.sinks)
        checks.made("optim", self.optim, AdamParams, "weft.AdamParams(beta2=0.95)")
        checks.made("checkpoint", self.checkpoint, Checkpoints | None, "rl.Checkpoints('name')")
        checks.finite("epochs", self.epochs, above=True)
        checks.rate("learning_rate", self.learning_rate)
        checks.seed(self.seed)
        if self.budget_usd is not None:
            checks.finite("budget_usd", self.budget_usd)


#: Gives the metrics of a gradient, once it is computed.
Shown = Callable[[], Mapping[str, float]]
#: Starts the gradient of some items without waiting for it. It takes the cost out of the purse before it sends
#: anything.
Backward = Callable[[Sequence[T], Purse], Shown]


def go(
    run: TrainingClient,
    items: Sequence[T],
    backward: Backward[T],
    recipe: Recipe,
    between: Callable[[int, bool, Purse], Mapping[str, float]] = lambda step, last, purse: {},
    most: int | None = None,
) -> Report:
    """Take one optimizer step for each batch. `between` is called after each step and gives further numbers; it is told
    whether the step is the last. `most` is the longest item, in tokens, that another reader of the items (the
    reference) takes."""
    checks.listed("data", items)
    if not items:
        raise ValueError(
            "there are no data to train on: rl.conversations keeps only talks with an assistant's answer that begins "
            "within max_length"
        )
    with alone(run):
        taken = wait(model_limits(run)).context_length
        _fitting(items, taken if most is None else min(most, taken))
        return _go(run, items, backward, recipe, between)


def _fitting(items: Sequence[Any], most: int) -> None:
    """Raise for an item that is no datum, or longer than the base model takes: its step would end the run after all
    steps before it. Items that are made on access are not checked."""
    for index, item in enumerate(items if isinstance(items, list | tuple) else ()):
        data = getattr(item, "data", (item,))
        if not all(hasattr(datum, "model_input") for datum in data):
            raise TypeError(f"data[{index}] must be as rl.conversations or rl.pairs makes it, got {item!r:.80}")
        of_pair = hasattr(item, "data")  # the reference reads the last target, too, so a pair takes one token more
        length = max(datum.model_input.length for datum in data) + of_pair
        if length > most:
            raise ValueError(
                f"data[{index}] has {length} tokens, the base model takes {most}: leave it out, or cut it"
                f" (rl.conversations(..., max_length={most}))"
            )


def _go(
    run: TrainingClient,
    items: Sequence[T],
    backward: Backward[T],
    recipe: Recipe,
    between: Callable[[int, bool, Purse], Mapping[str, float]],
) -> Report:
    size = min(recipe.batch, len(items))
    steps = max(1, math.floor(len(items) * recipe.epochs / size + 0.5))
    order, report = Shuffled(len(items), recipe.seed), Report()
    began, state = _resume(run, recipe, steps, size)
    purse = wait(money.purse(run, recipe.budget_usd, state["runs"], state["elsewhere"]))
    order.drawn = state["step"] * size
    report.resumed_at = saved = state["step"]
    runs = list(dict.fromkeys([*state["runs"], run.model_id]))
    sinks = [Progress()] if recipe.sinks is None else list(recipe.sinks)
    done = report.resumed_at

    def save() -> None:
        assert recipe.checkpoint is not None
        paid = money.paid_elsewhere(purse, state["elsewhere"], run.model_id)
        known = {"step": done, "batch": size, "runs": runs, "elsewhere": paid}
        wait(recipe.checkpoint.save(run, done, known, began))

    if recipe.budget_usd is not None and recipe.checkpoint is not None and done < steps:
        save()  # a life that dies before its next save must still be counted
    try:
        for step in range(report.resumed_at, steps):
            params = params_of(recipe.optim, recipe.learning_rate, step)
            shown = backward([items[order.draw()] for _ in range(size)], purse)
            # The step is sent before the batch is waited for: a Ctrl-C between the two would leave the gradient to the
            # next step.
            update = run.optim_step(params)
            numbers = {**shown(), **plain(update.result().metrics or {})}
            done = step + 1
            numbers["spent_usd"] = purse.spent_nusd / money.NUSD
            report.steps.append(numbers)
            try:
                numbers |= between(step, done == steps, purse)
            finally:  # the step is taken, however the loop ends here
                run.log(numbers, step)
                tell(sinks, step, steps, numbers)
            if recipe.checkpoint is not None and done % recipe.checkpoint.every == 0:
                save()
                saved = done
    except BudgetSpent as why:
        logger.warning("%s", why)
        report.ended = "budget"
    finally:
        close(sinks)
    if recipe.checkpoint is not None and done > saved:
        save()
    report.spent_nusd = purse.spent_nusd
    return report


def _resume(run: TrainingClient, recipe: Recipe, steps: int, size: int) -> tuple[str | None, dict[str, Any]]:
    """The checkpoint to resume from, and its state. Raises ValueError if it was saved with another batch size: its step
    count would then skip data, or train some twice."""
    found = wait(recipe.checkpoint.newest(run.create_rest_client())) if recipe.checkpoint else None
    if found is None:
        return None, {"step": 0, "runs": [], "elsewhere": {}}
    if (saved := found[1].get("batch", size)) != size:
        assert recipe.checkpoint is not None
        raise ValueError(
            f"{recipe.checkpoint.name!r} was saved with batch={saved}, got {size}: what is trained is counted in"
            f" steps. Give batch={saved}, or the checkpoints another name"
        )
    run.load_state_with_optimizer(found[0]).result()
    tell_resumed(recipe.checkpoint, found[0], found[1]["step"], steps)
    return found


def wait(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, for loops that wait for one thing at a time."""
    return APIFuture.start(work).result()
