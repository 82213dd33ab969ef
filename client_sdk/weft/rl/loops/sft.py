"""`sft`: supervised fine-tuning on data of `rl.conversations`, or any of cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl import checks
from weft.rl.chat.purse import Purse
from weft.rl.loops.conversations import scaled
from weft.rl.loops.supervised import Recipe, Shown, go
from weft.rl.loops.train import Report
from weft.training_client import TrainingClient
from weft.wire.inputs import Datum


def sft(
    run: TrainingClient, data: Sequence[Datum], *, test: Sequence[Datum] = (), every: int = 50, **recipe: Any
) -> Report:
    """Train on `data`, the mean over the trained tokens of each batch by their weights. The rest is `Recipe`'s.

    The server packs short sequences together. `test` is scored every so many steps and after the last, not trained on:
    `test/loss`.
    """
    checks.count("every", every)

    def backward(batch: Sequence[Datum], purse: Purse) -> Shown:
        tokens = _weight(batch)
        purse.pay(purse.price(train=sum(datum.model_input.length for datum in batch)) + len(batch))
        weighted = [scaled(datum, 1 / _whole(tokens)) for datum in batch]
        computed = run.forward_backward(weighted, "cross_entropy")
        return lambda: {"loss": computed.result().metrics["loss:sum"], "tokens": tokens}

    def between(step: int, last: bool, purse: Purse) -> dict[str, float]:
        if not test or not (last or (step + 1) % every == 0):
            return {}
        purse.pay(purse.price(prefill=sum(datum.model_input.length for datum in test)) + len(test))
        return {"test/loss": nll(run, test)}

    return go(run, data, backward, checks.recipe(Recipe, recipe), between)


def nll(run: TrainingClient, data: Sequence[Datum]) -> float:
    """Mean negative logprob of what `data` weigh, with the weights of now."""
    return run.forward(data, "cross_entropy").result().metrics["loss:sum"] / _whole(_weight(data))


def _weight(data: Sequence[Datum]) -> float:
    return sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)


def _whole(weight: float) -> float:
    """What a sum is divided by: nothing where data weigh nothing, or less."""
    return weight if weight > 0 else 1.0
