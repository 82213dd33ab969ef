"""What a loop sends, tells and pays, to the digit, with a run that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from weft import rl
from weft.wire.account.limits import PricesResponse
from weft.wire.inputs import Datum, ModelInput
from weft.wire.sampling import SamplingParams
from weft.wire.training import GetInfoResponse

from tests.client_sdk.rl.kit import Said, Scripted, tokenizer
from tests.client_sdk.rl.test_refused import Priced

#: In nano-dollars.
READ, DRAWN, TRAINED = 50, 10, 100
PROMPT = "3 + 5"


class Done:
    """What has been computed already."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __await__(self) -> Generator[None, None, Any]:
        return self.found
        yield

    def result(self) -> Any:
        return self.found


class Weights(Scripted):
    """A sampler that can be awaited, as one of a run is."""

    def __await__(self) -> Generator[None, None, Weights]:
        return self
        yield


class Pupil(Priced):
    """In place of a run of five steps: `sent` has the data of each gradient. First it says the first answers, after a
    step the next; the last are those of an evaluation."""

    model_id = "run"

    def __init__(self, *answers: Sequence[str]) -> None:
        first, *self.later = (
            Weights(*(Said(ids(text), version=step) for text in each)) for step, each in enumerate(answers, 5)
        )
        super().__init__(first, tokenizer().convert_tokens_to_ids(["<|endoftext|>"]))
        self.said, self.sent, self.logged = [first, *self.later], list[list[Datum]](), list[dict[str, float]]()

    def get_info(self) -> GetInfoResponse:
        return asyncio.run(self.get_info_async())

    def get_prices(self, base_model: str) -> Any:
        rates: dict[Any, int] = {"prefill": READ * 1000, "sample": DRAWN * 1000, "train": TRAINED * 1000}
        return Done(PricesResponse(base_model=base_model, price_version="1", rates_uusd_per_mtok=rates))

    async def save_weights_and_get_sampling_client_async(self, **kind: str) -> Scripted:
        return self.sampler if kind else self.said[-1]

    def save_weights_and_get_sampling_client(self, kind: str) -> Any:
        return self.later.pop(0)

    def create_custom_loss(self, fn: Any, inputs: Any) -> Any:
        return Done(SimpleNamespace(loss_id=None))

    def forward_backward(self, data: list[Datum], loss: str, config: Any = None) -> Any:
        self.sent.append(data)
        return Done(SimpleNamespace(metrics={"loss:sum": 0.25}))

    def forward_backward_custom(self, data: list[Datum], handle: Any) -> Any:
        return self.forward_backward(data, "", {})

    def optim_step(self, params: Any) -> Any:
        return Done(SimpleNamespace(metrics={"grad_norm:mean": 2.0}))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.logged.append({"step": step, **numbers})


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text + "<|im_end|>"))


def is_8(text: str, task: Any) -> float:
    return float(text == "8")


@pytest.mark.parametrize("passes", [1, 2], ids=["of the server", "traced, and computed here"])
def test_a_report_has_each_steps_numbers_and_all_that_was_paid(passes: int) -> None:
    answers = [("8", "it is 9"), ("9", "8")]
    run = Pupil(*answers, (), ("8", "nine"))
    tried = rl.Evaluation(rl.prompts([PROMPT, PROMPT], is_8, max_tokens=8), every=2)
    loss = rl.losses.ppo() if passes == 1 else rl.losses.icepop()
    more: dict[str, Any] = {"loss": loss, "evaluation": tried, "sinks": [], "groups": rl.Groups(1, 2), "steps": 2}
    more["sampling"] = SamplingParams(temperature=0.5)
    report = rl.train(cast(Any, run), rl.prompts([PROMPT], is_8, max_tokens=8), **more)

    prompt = len(run.sampler.asked[0])
    lengths = [[datum.model_input.length for datum in data] for data in run.sent]
    assert lengths == [[prompt + len(ids(text)) - 1 for text in texts] for texts in answers]
    sampled = [READ * prompt + DRAWN * sum(len(ids(text)) for text in texts) for texts in answers]
    trained = [(TRAINED + READ * (passes - 1)) * sum(each) + 2 * passes for each in lengths]
    evaluated = 2 * READ * prompt + DRAWN * (len(ids("8")) + len(ids("nine")))
    assert report.spent_nusd == sum(sampled) + sum(trained) + evaluated
    first, second = report.steps
    logged = {name: value for name, value in second.items() if name != "eval/reward"}
    assert first["spent_usd"] == pytest.approx((sampled[0] + trained[0]) / 1e9)
    assert [first[name] for name in ("reward", "loss", "grad_norm", "data", "rollouts")] == [0.5, 0.25, 2.0, 2.0, 2.0]
    assert [each for each in run.logged if "loss" in each] == [{"step": 0, **first}, {"step": 1, **logged}]
    assert [step[f"lag/{name}"] for step in report.steps for name in ("max", "mean")] == [0] * 4
    assert [params.temperature for each in run.said for params in each.params] == [0.5, 0.5, 1.0, 1.0]
    assert ["eval/reward" in first, second["eval/reward"]] == [False, 0.5]

    def asked(sampler: Scripted) -> tuple[set[Any], set[tuple[int, ...]]]:
        return {each["priority"] for each in sampler.more}, {tuple(each.stop) for each in sampler.params}

    ends = tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    told = [{None}, {None}, set(), {"batch"}]
    assert [asked(each) for each in run.said] == [(each, {tuple(sorted(ends))} if each else set()) for each in told]


class Teacher(Pupil):
    """Knows each token by a rule; `read` is what it was asked to score."""

    def __init__(self) -> None:
        super().__init__(())
        self.read = list[list[int]]()

    async def compute_logprobs_async(self, whole: ModelInput, last: int) -> list[float]:
        self.read.append(whole.to_ints())
        return self.of(whole.to_ints())[-last:]

    @staticmethod
    def of(tokens: list[int]) -> list[float]:
        return [-(token % 7) / 8 for token in tokens]


@pytest.mark.parametrize("hint", [None, "It is 8."])
def test_a_teachers_opinion_of_each_drawn_token_is_its_advantage(hint: str | None) -> None:
    answers = ["8", "it is 9"]
    run, teacher = Pupil(answers, ()), Teacher()
    hints = hint and (lambda task: [{"role": "system", "content": f"{task} {hint}"}])
    env = rl.prompts([PROMPT], lambda text, task: 1.0, max_tokens=8)
    more: dict[str, Any] = {"hint": hints, "steps": 1, "groups": rl.Groups(1, 2), "sinks": []}
    report = rl.distill(cast(Any, run), env, cast(Any, teacher), **more)

    [data], [prompt] = run.sent, {tuple(each) for each in run.sampler.asked}
    drawn = [ids(answer) for answer in answers]
    count, gaps, before = sum(map(len, drawn)), list[float](), 0
    for datum, tokens, read in zip(data, drawn, teacher.read, strict=True):
        before = len(read) - len(prompt) - len(tokens)
        assert tuple(read[before:]) == (*prompt, *tokens)
        assert (tokenizer().decode(read[:before]).count(f"{PROMPT} {hint}") == 1) is (hint is not None)
        gap = np.asarray(Teacher.of(tokens)) - [-0.5 - place for place in range(len(tokens))]
        expected = [0.0] * (len(prompt) - 1) + list(gap / count)
        np.testing.assert_allclose(datum.loss_fn_inputs["advantages"].to_numpy(), expected, rtol=1e-5)
        gaps += list(gap)
    assert (before > 0) is (hint is not None)
    assert report.steps[0]["reverse_kl"] == pytest.approx(-np.mean(gaps), rel=1e-5)
    scored = sum(READ * len(read) + DRAWN for read in teacher.read)
    trained = sum(TRAINED * datum.model_input.length + 1 for datum in data)
    assert report.spent_nusd == READ * len(prompt) + DRAWN * count + scored + trained
