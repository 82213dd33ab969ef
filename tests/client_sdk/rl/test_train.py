"""What a loop sends, reports and pays, to the digit, with a run that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from weft import rl
from weft.rl.chat.purse import BudgetSpent
from weft.rl.chat.render import TemplateRenderer
from weft.wire.account.limits import LimitsResponse, ModelLimits, PricesResponse
from weft.wire.inputs import Datum, ModelInput
from weft.wire.sampling import SamplingParams
from weft.wire.training import GetInfoResponse

from tests.client_sdk.rl.kit import Said, Scripted, tokenizer
from tests.client_sdk.rl.test_refused import Priced

#: In nano-dollars.
READ, DRAWN, TRAINED = 50, 10, 100
PROMPT = "3 + 5"


class Done:
    """A result that has been computed already."""

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
    """Stands for a run of five steps: `sent` has the data of each gradient. It gives the first answers, after a step
    the next ones; the last ones are an evaluation's."""

    model_id, loss_id = "run", cast(str | None, None)

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
        return Done(SimpleNamespace(loss_id=self.loss_id))

    def forward_backward(self, data: list[Datum], loss: str, config: Any = None) -> Any:
        self.sent.append(data)
        return Done(SimpleNamespace(metrics={"loss:sum": 0.25, "ratio:mean": 1.0, "ratio:max": 2.0, "step:max": 3.0}))

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


@pytest.mark.parametrize(
    ("loss", "loss_id", "passes"),
    [(rl.losses.ppo(), None, 1), (rl.losses.icepop(), "loss", 1), (rl.losses.icepop(), None, 2)],
    ids=["of the server", "traced", "traced, and computed here"],
)
def test_a_report_has_each_steps_numbers_and_all_that_was_paid(loss: Any, loss_id: Any, passes: int) -> None:
    answers = [("8", "it is 9"), ("9", "8")]
    run = Pupil(*answers, (), ("8", "nine"))
    tried = rl.Evaluation(rl.prompts([PROMPT, PROMPT], is_8, max_tokens=8), every=2)
    run.loss_id = loss_id
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
    assert [first["ratio"], first["ratio/max"], "step" in first] == [1.0, 2.0, False]
    assert [step[f"lag/{name}"] for step in report.steps for name in ("max", "mean")] == [0] * 4
    assert [params.temperature for each in run.said for params in each.params] == [0.5, 0.5, 1.0, 1.0]
    assert ["eval/reward" in first, second["eval/reward"]] == [False, 0.5]

    def asked(sampler: Scripted) -> tuple[set[Any], set[tuple[int, ...]]]:
        return {each["priority"] for each in sampler.more}, {tuple(each.stop) for each in sampler.params}

    ends = tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    told = [{None}, {None}, set(), {"batch"}]
    assert [asked(each) for each in run.said] == [(each, {tuple(sorted(ends))} if each else set()) for each in told]


def test_what_a_loop_is_told_of_its_rollouts_reaches_them(caplog: pytest.LogCaptureFixture) -> None:
    class Same(rl.Shuffled):
        def draw(self) -> int:
            return 7

    def life(seed: int) -> list[str]:
        seen, closed, run = list[str](), list[bool](), Pupil(())
        run.get_tokenizer = cast(Any, None)  # not asked for, as a renderer is given

        def env(name: str) -> Any:
            async def solve(task: Any, chat: rl.Chat) -> float:
                seen.append(f"{name}{task}")
                return 1.0

            return rl.function(solve, range(9))

        sink = SimpleNamespace(log=lambda *told: None, close=lambda: closed.append(True))
        more: dict[str, Any] = {"ratios": {"a": 3, "b": 1}, "sources": {"a": Same(9)}, "steps": 1, "seed": seed}
        more |= {"renderer": TemplateRenderer(tokenizer()), "groups": rl.Groups(8, 1), "sinks": [sink]}
        both = {"a": env("a"), "b": env("b")}
        report = rl.train(cast(Any, run), both, concurrency=rl.Concurrency(3), **more)
        assert [report.steps[0]["in_flight/limit"], report.curve("loss"), run.sent, closed] == [3, [], [], [True]]
        return sorted(seen)

    assert life(0)[:6] == ["a7"] * 6
    assert [each[0] for each in life(0)[6:]] == ["b", "b"]
    assert life(0) == life(0) != life(1)
    assert "(rewards from 1 to 1; a group of size 1 has no others)" in caplog.text


@pytest.mark.parametrize("own", [False, True])
def test_data_have_the_advantages_of_rewards_behind_the_penalty(own: bool) -> None:
    """If an environment computes its own advantages, those."""
    run = Pupil(("8", "it is 9"), ())
    env = rl.prompts(
        [PROMPT], max_tokens=8, advantage=(lambda rewards: [2 * each for each in rewards]) if own else None
    )
    more: dict[str, Any] = {"penalty": lambda rewards, sizes: [0.0, 3.0], "reduce": "sum", "advantage": rl.reinforce}
    rl.train(cast(Any, run), env, steps=1, groups=rl.Groups(1, 2), sinks=[], **more)
    [[datum]] = run.sent
    drawn = len(ids("it is 9"))
    advantages = datum.loss_fn_inputs["advantages"].to_numpy().tolist()
    assert advantages == [0.0] * (len(advantages) - drawn) + [6.0 if own else 3.0] * drawn


def test_an_evaluation_that_fails_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    async def solve(task: Any, chat: rl.Chat) -> float:
        raise BudgetSpent("no more")

    run, tried = Pupil(("8", "9"), ()), rl.Evaluation(rl.function(solve, [1]), every=1)
    env = rl.prompts([PROMPT], is_8, max_tokens=8)
    report = rl.train(cast(Any, run), env, steps=1, groups=rl.Groups(1, 2), evaluation=tried, sinks=[])
    assert (report.ended, len(report.steps)) == ("done", 1)
    assert "the evaluation of step 0 failed: no more" in caplog.text


class Teacher(Pupil):
    """Scores each token by a rule; `read` are the requests, of at most `context` tokens."""

    def __init__(self, context: int = 2048) -> None:
        super().__init__(())
        self.context, self.read = context, list[list[int]]()

    async def get_limits(self) -> LimitsResponse:
        return LimitsResponse(models={"base": ModelLimits(vocab_size=1000, context_length=self.context)}, losses={})

    async def compute_logprobs_async(self, whole: ModelInput, last: int) -> list[float]:
        self.read.append(whole.to_ints())
        return self.of(whole.to_ints())[-last:]

    @staticmethod
    def of(tokens: list[int]) -> list[float]:
        return [-(token % 7) / 8 for token in tokens]


@pytest.mark.parametrize("said", [None, "It is 8.", ["It is 8."], {"role": "system", "content": "It is 8."}])
def test_a_hint_that_is_no_list_of_messages_is_named(said: Any) -> None:
    env = rl.prompts([PROMPT], max_tokens=8)
    run, more = cast(Any, Pupil(["8"], ())), {"steps": 1, "groups": rl.Groups(1, 1), "sinks": []}
    with pytest.raises(TypeError, match=r"^hint must return a list of messages, got"):
        rl.distill(run, env, cast(Any, Teacher()), hint=cast(Any, lambda task: said), **cast(Any, more))


@pytest.mark.parametrize("hint", [None, "It is 8."])
@pytest.mark.parametrize("reads", ["advantages", "ref"])
def test_a_teachers_opinion_of_each_drawn_token_is_its_advantage(hint: str | None, reads: str) -> None:
    """For a loss that reads `ref`, the teacher's logprob itself."""
    answers = ["8", "it is 9"]
    run, teacher = Pupil(answers, ()), Teacher()
    hints = hint and (lambda task: [{"role": "system", "content": f"{task} {hint}"}])
    env = rl.prompts([PROMPT], lambda text, task: 1.0, max_tokens=8)
    more: dict[str, Any] = {"hint": hints, "steps": 1, "groups": rl.Groups(1, 2), "sinks": []}
    more |= {"loss": rl.losses.ref_kl()} if reads == "ref" else {}
    report = rl.distill(cast(Any, run), env, cast(Any, teacher), **more)

    [data], [prompt] = run.sent, {tuple(each) for each in run.sampler.asked}
    drawn = [ids(answer) for answer in answers]
    count, gaps, before = sum(map(len, drawn)), list[float](), 0
    for datum, tokens, read in zip(data, drawn, teacher.read, strict=True):
        before = len(read) - len(prompt) - len(tokens)
        assert tuple(read[before:]) == (*prompt, *tokens)
        assert (tokenizer().decode(read[:before]).count(f"{PROMPT} {hint}") == 1) is (hint is not None)
        gap = np.asarray(Teacher.of(tokens)) - [-0.5 - place for place in range(len(tokens))]
        said = list(gap / count) if reads == "advantages" else Teacher.of(tokens)
        found = datum.loss_fn_inputs[reads].to_numpy()
        np.testing.assert_allclose(found, [0.0] * (len(prompt) - 1) + said, rtol=1e-5)
        gaps += list(gap)
    assert (before > 0) is (hint is not None)
    assert report.steps[0]["reverse_kl"] == pytest.approx(-np.mean(gaps), rel=1e-5)
    scored = sum(READ * len(read) + DRAWN for read in teacher.read)
    passes = 1 if reads == "advantages" else 2
    trained = sum((TRAINED + READ * (passes - 1)) * datum.model_input.length + passes for datum in data)
    assert report.spent_nusd == READ * len(prompt) + DRAWN * count + scored + trained


def test_distilling_at_another_temperature_is_refused() -> None:
    """Even if a single turn sets the temperature, not the loop: ref and q would be of two distributions."""

    async def solve(task: Any, chat: rl.Chat) -> float:
        chat.params = SamplingParams(temperature=0.5)
        await chat.user(task).sample(max_tokens=8)
        return 1.0

    more: dict[str, Any] = {"steps": 1, "groups": rl.Groups(1, 1), "sinks": []}
    with pytest.raises(ValueError, match=r"at temperature 1; the policy would draw at 0\.5"):
        rl.distill(cast(Any, Pupil(["8"], ())), rl.function(solve, [PROMPT]), cast(Any, Teacher()), **more)


@pytest.mark.parametrize("reads", ["advantages", "mask"])
@pytest.mark.parametrize("reduce", ["tokens", "rollouts", "sum"])
def test_distillation_is_divided_by_what_it_is_told(reduce: str, reads: str) -> None:
    """A loss that reads `ref` has its mask divided, others the teacher's difference."""
    answers = ["8", "it is 9"]
    drawn = [ids(answer) for answer in answers]
    whole = {"tokens": sum(map(len, drawn)), "rollouts": 2, "sum": 1}[reduce]
    run, env = Pupil(answers, ()), rl.prompts([PROMPT], max_tokens=8)
    more: dict[str, Any] = {"steps": 1, "groups": rl.Groups(1, 2), "sinks": [], "reduce": reduce}
    more |= {"loss": rl.losses.ref_kl()} if reads == "mask" else {}
    report = rl.distill(cast(Any, run), env, cast(Any, Teacher()), **more)
    gaps = [np.asarray(Teacher.of(tokens)) - [-0.5 - place for place in range(len(tokens))] for tokens in drawn]
    for datum, tokens, gap in zip(run.sent[0], drawn, gaps, strict=True):
        said = np.ones(len(tokens)) if reads == "mask" else gap
        np.testing.assert_allclose(datum.loss_fn_inputs[reads].to_numpy()[-len(tokens) :], said / whole, rtol=1e-5)
    assert report.steps[0]["reverse_kl"] == pytest.approx(-np.mean(np.concatenate(gaps)), rel=1e-5)


@pytest.mark.parametrize(("short", "data"), [(0, 2), (1, 1), (20, 0)])
def test_a_teacher_is_asked_for_what_just_fits_it(short: int, data: int, caplog: pytest.LogCaptureFixture) -> None:
    answers = ["8", "it is 9"]
    run, env = Pupil(answers, ["9", "it is 9"], ()), rl.prompts([PROMPT], max_tokens=8)
    prompt = TemplateRenderer(tokenizer()).render_ids([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    whole = len(prompt) + len(ids("it is 9"))
    if not data:  # no step, and so no newer weights
        run.sampler.answers *= 2
    more: dict[str, Any] = {"steps": 2, "groups": rl.Groups(1, 2), "sinks": []}
    report = rl.distill(cast(Any, run), env, cast(Any, Teacher(whole - short)), **more)
    assert report.curve("data") == [data] * 2
    assert len(set(report.curve("reverse_kl"))) == (2 if data else 1)
    assert report.curve("too_long_for_teacher") == [2.0 - data] * 2 * (data < 2)
    told = f"the teacher takes {whole - short} tokens, and a rollout with its hint has {whole}:"
    assert sum(told in each.getMessage() for each in caplog.records) == (data < 2)
