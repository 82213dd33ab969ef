"""`dpo`: preferences (arXiv 2305.18290), in closed form and so without torch.

With h = beta [(lp_c - ref_c) - (lp_r - ref_r)], sums over the tokens of an answer, the loss of a pair is
-log sigmoid(h). Its gradient with respect to each logprob of the chosen answer is -beta sigmoid(-h), of the rejected
one the opposite: a cross entropy with these weights. So a step is a forward pass for the logprobs, and one with
gradients.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.rl import checks
from weft.rl.chat.purse import Purse
from weft.rl.chat.render import TemplateRenderer
from weft.rl.loops import money
from weft.rl.loops.limits import sampler_limits
from weft.rl.loops.report import Report
from weft.rl.supervised.conversations import in_row, scaled, supervised
from weft.rl.supervised.loop import Recipe, Shown, go, wait
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.wire.inputs import Datum, ModelInput


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the chosen and the rejected one, each as a datum for cross entropy."""

    chosen: Datum
    rejected: Datum

    @property
    def data(self) -> tuple[Datum, Datum]:
        return self.chosen, self.rejected


def pairs(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
) -> list[Pair]:
    """Rows with a prompt (text, or messages) and two answers (text), by the base model's chat template."""
    renderer = TemplateRenderer(tokenizer)

    def datum(row: Mapping[str, Any], answer: str) -> Datum:
        asked = row[prompt]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        read = renderer.render_ids(messages, add_generation_prompt=True)
        *_, (whole, sampled) = renderer.example([*messages, {"role": "assistant", "content": row[answer]}])
        last = max(place for place, each in enumerate(sampled) if each)
        drawn = [place >= len(read) and each for place, each in enumerate(sampled)]
        return supervised(whole[: last + 1], drawn[: last + 1])

    made = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            names = f"{prompt!r}, {chosen!r} and {rejected!r}"
            raise ValueError(f"rows[{number}] must have {names} by name, got {row!r:.80}")
        for name in (prompt, chosen, rejected):
            if name not in row:
                raise ValueError(f"rows[{number}] has no {name!r}: name your columns, which are {list(row)}")
        for name in (chosen, rejected):
            if not isinstance(row[name], str):
                raise ValueError(f"rows[{number}][{name!r}] must be the answer's text, got {row[name]!r:.80}")
        with in_row(number):
            made.append(Pair(datum(row, chosen), datum(row, rejected)))
    return made


def dpo(
    run: TrainingClient,
    data: Sequence[Pair],
    *,
    reference: SamplingClient,
    beta: float = 0.1,
    **recipe: Any,
) -> Report:
    """Train on pairs, the mean over each batch. `reference` is most often the base model. The rest is `Recipe`'s."""
    checks.finite("beta", beta, above=True)
    going = checks.recipe(Recipe, recipe)
    checks.does("reference", reference, "get_base_model_async", "service.create_sampling_client(...)")
    context, asked = _Scorer(reference), wait(money.prices_of(reference))
    known: dict[int, tuple[float, float]] = {}  # the reference's two sums for each pair, by the pair's id

    def backward(batch: Sequence[Pair], purse: Purse) -> Shown:
        flat = [datum for pair in batch for datum in pair.data]
        tokens = sum(datum.model_input.length for datum in flat)
        unknown = list({id(pair): pair for pair in batch if id(pair) not in known}.values())
        new = [datum for pair in unknown for datum in pair.data]
        scored = sum(datum.model_input.length + 1 for datum in new)
        purse.pay(asked.price(prefill=scored, sample=len(new)) + 4 * len(new), elsewhere=True)
        purse.pay(purse.price(prefill=tokens, train=tokens) + 4 * len(flat))
        known.update(zip(map(id, unknown), context.scores(new), strict=True))
        for pair in unknown:  # pairs that are made on access do not stay alive, and later ones could get their ids
            weakref.finalize(pair, known.pop, id(pair), None)
        lps = _sums(flat, run.forward(flat, "cross_entropy").result().loss_fn_outputs)
        margins = np.asarray([_margin(known[id(pair)], *lps[2 * i : 2 * i + 2]) for i, pair in enumerate(batch)])
        h = beta * margins
        pull = beta / (1 + np.exp(h)) / len(batch)
        weighted = [
            scaled(datum, sign * float(p))
            for pair, p in zip(batch, pull, strict=True)
            for datum, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        ]
        computed = run.forward_backward(weighted, "cross_entropy")

        def shown() -> dict[str, float]:
            computed.result()
            return {
                "loss": float(np.logaddexp(0, -h).mean()),
                "accuracy": float((margins > 0).mean()),
                "margin": float(h.mean()),
            }

        return shown

    return go(run, data, backward, going, most=wait(sampler_limits(reference)).context_length)


class _Scorer:
    """Computes logprobs of answers with a sampler."""

    def __init__(self, sampler: SamplingClient) -> None:
        self._sampler = sampler

    def scores(self, data: Sequence[Datum]) -> list[tuple[float, float]]:
        """For data that come in pairs (chosen, rejected, chosen, ...): each pair's two sums of logprobs over the
        weighted tokens."""

        async def all_of() -> list[float]:
            return list(await asyncio.gather(*(self._one(datum) for datum in data)))

        found = wait(all_of())
        return list(zip(found[::2], found[1::2], strict=True))

    async def _one(self, datum: Datum) -> float:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        whole = [*datum.model_input.to_ints(), int(targets[-1])]
        logprobs = await self._sampler.compute_logprobs_async(ModelInput.from_ints(whole))
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        return float(sum(lp * w for lp, w in zip(logprobs[1:], weights, strict=True) if lp is not None and w))


def _sums(data: Sequence[Datum], outputs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [
        float(np.sum(output["logprobs"].to_numpy() * datum.loss_fn_inputs["weights"].to_numpy(), dtype=np.float64))
        for datum, output in zip(data, outputs, strict=True)
    ]


def _margin(reference: tuple[float, float], chosen: float, rejected: float) -> float:
    return (chosen - reference[0]) - (rejected - reference[1])
