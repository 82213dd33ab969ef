"""`sft`: supervised fine-tuning on data of `rl.conversations`, or any of cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl import checks
from weft.rl.chat.purse import Purse
from weft.rl.loops.report import Report
from weft.rl.supervised.conversations import scaled
from weft.rl.supervised.loop import Recipe, Shown, go
from weft.training_client import TrainingClient
from weft.wire.inputs import Datum


def sft(
    run: TrainingClient, data: Sequence[Datum], *, test: Sequence[Datum] = (), every: int = 50, **recipe: Any
) -> Report:
    """Train on `data`: the loss of a batch is the mean over its trained tokens, weighted by their weights. Other
    arguments are `Recipe`'s.

    The server packs short sequences together. `test` data are not trained on; their loss is logged as `test/loss` every
    so many steps and after the last.
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
    """The mean negative logprob, by weight, of `data` under the run's present weights."""
    return run.forward(data, "cross_entropy").result().metrics["loss:sum"] / _whole(_weight(data))


def _weight(data: Sequence[Datum]) -> float:
    return sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)


def _whole(weight: float) -> float:
    """The divisor of a weighted sum: the sum of the weights, or 1 if that is not positive."""
    return weight if weight > 0 else 1.0
