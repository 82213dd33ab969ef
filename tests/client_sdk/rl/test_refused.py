"""The mistakes that users make first are answered with what was wrong and what to do instead."""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from weft import rl
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.chat.render import TemplateRenderer
from weft.rl.envs.environment import reward_of
from weft.wire.account.limits import LimitsResponse, ModelLimits, PricesResponse
from weft.wire.inputs import Datum, ModelInput

from tests.client_sdk.rl.kit import Scripted, policy, tokenizer
from tests.client_sdk.rl.test_batch import batch
from tests.client_sdk.rl.test_rollouts import Run

NOBODY = cast(Any, None)
TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "a reward is a number or rl.Reward(number, metrics), got None"),
        ((1.0, {}), "a reward is a number or rl.Reward(number, metrics), got (1.0, {})"),
        ("1.0", "a reward is a number or rl.Reward(number, metrics), got '1.0'"),
        (float("nan"), "a reward must be finite, got nan"),
        (rl.Reward(float("inf")), "a reward must be finite, got inf"),
    ],
)
def test_rewards(found: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        reward_of(found)
    assert str(refused.value) == says


PROMPTS = rl.prompts(["?"])


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (lambda run: rl.train("org/tiny", PROMPTS), "run must be as service.create_lora_training_client(...) makes it"),
        (
            lambda run: rl.sft("org/tiny", cast(Any, ["?"])),
            "run must be as service.create_lora_training_client(...) makes it",
        ),
        (lambda run: rl.train(run, ["?"]), "env must be as rl.prompts(tasks, reward) makes it, got ['?']"),
        (lambda run: rl.train(run, PROMPTS, advantage="grpo"), "advantage must be a function, such as rl.grpo"),
        (lambda run: rl.train(run, PROMPTS, penalty=1), "penalty must be a function, such as rl.lengths.linear()"),
        (lambda run: rl.train(run, PROMPTS, sampling={}), "sampling must be as weft.SamplingParams(max_tokens=64)"),
        (lambda run: rl.train(run, PROMPTS, sinks=rl.Progress()), "sinks must be as [rl.Progress()] makes it"),
        (lambda run: rl.sft(run, [], sinks=rl.Progress()), "sinks must be as [rl.Progress()] makes it"),
        (lambda run: rl.sft(run, iter("?")), "data must be a list, or what has a length and an index as one"),
        (lambda run: rl.distill(run, PROMPTS, "org/tiny"), "teacher must be as service.create_sampling_client(...)"),
        (lambda run: rl.dpo(run, [], reference="org/tiny"), "reference must be as service.create_sampling_client(...)"),
    ],
)
def test_arguments_of_another_kind_are_named_before_anything_is_drawn(begin: Any, says: str) -> None:
    run = Priced(Scripted(), None)
    with pytest.raises(TypeError, match=re.escape(says)):
        begin(run)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"question": "?"}, "a task has no 'prompt': name its column (prompt=...), of ['question']"),
        ({"prompt": None}, "a prompt must be a text or a list of messages, got None"),
        ({"prompt": TALK[0]}, "a prompt must be a text or a list of messages, got {'role'"),
        ({"prompt": [{"role": "user", "content": 3}]}, "'content' must be a text or a list of parts, got 3"),
    ],
)
def test_tasks_that_ask_nothing_are_named(task: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        asyncio.run(rl.prompts([task]).group(task, [rl.Chat(policy("8")[0])]))


def test_solve_that_is_no_async_function_is_told_so() -> None:
    env = rl.function(cast(Any, lambda task, chat: 1.0), ["?"])
    [outcome] = asyncio.run(env.group("?", [rl.Chat(policy()[0])]))
    assert str(outcome) == "solve must be an async function (async def solve(task, chat)); it returned 1.0"


@pytest.mark.parametrize("found", [[0.0], [float("nan")] * 2, [1e200, -1e200]])
def test_advantages_that_no_datum_holds_are_refused_where_they_are_made(found: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^advantages must be .* for \[0, 0.5\] got"):
        batch(0, 0.5).data(lambda rewards: found, rl.losses.ppo())
    with pytest.raises(ValueError, match=r"^rewards behind `penalty` must be a finite number for each"):
        batch(0, 0.5).data(rl.dr_grpo, rl.losses.ppo(), penalty=lambda rewards, sizes: found)


def test_what_verifiers_would_sample_at_is_the_loops_to_say() -> None:
    with pytest.raises(ValueError, match=r"sampling: 'temperature' is .* rl\.train\(sampling=SamplingParams"):
        rl.verifiers(object(), sampling={"max_tokens": 8, "temperature": 0.7})


def test_a_notebook_is_told_what_to_await() -> None:
    async def cell() -> None:
        with pytest.raises(RuntimeError, match=r"await rl\.train_async\(\.\.\.\) instead"):
            rl.train(NOBODY, rl.prompts(["?"]))
        with pytest.raises(RuntimeError, match=r"await rl\.distill_async\(\.\.\.\) instead"):
            rl.distill(NOBODY, rl.prompts(["?"]), NOBODY)

    asyncio.run(cell())
    with pytest.raises(TypeError) as failed:  # elsewhere the loop's error is told without that hint
        rl.train(NOBODY, rl.prompts(["?"]))
    assert failed.value.__context__ is None


@pytest.mark.parametrize("row", [{"messages": TALK}, "a text", ["a text"], None])
def test_conversations_of_another_form(row: Any) -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] must be a list of messages, .*row\['messages'\] for row in rows"):
        rl.conversations([TALK, row], tokenizer())


def test_a_conversation_that_the_template_cannot_say_is_named() -> None:
    """It may be one of a hundred thousand."""
    strict = copy.copy(tokenizer())
    refusing = "{{ raise_exception('roles must alternate') if messages[0].content == '?!' }}"
    strict.chat_template = refusing + strict.chat_template
    wrong: dict[str, list[dict[str, Any]]] = {
        "empty conversation": [TALK[1]],
        "roles must alternate": [{**TALK[0], "content": "?!"}, TALK[1]],
        "a part of type 'image_url'": [TALK[0], {"role": "assistant", "content": [{"type": "image_url"}]}],
        "'role'": [TALK[0], {"content": "!"}],
    }
    for says, talk in wrong.items():
        with pytest.raises(ValueError, match=rf"^rows\[1\]: .*({says})"):
            rl.conversations([TALK, talk], strict)
    row = {"prompt": "?", "chosen": "8", "rejected": "9"}
    with pytest.raises(ValueError, match=r"^rows\[1\]: .*roles must alternate"):
        rl.pairs([row, {**row, "prompt": "?!"}], strict)


LOUD: list[tuple[Any, str, list[Any]]] = [
    (rl.Groups, "refill", ["no", 1, None]),
    (rl.Async, "inflight", ["no", 0, None]),
    (partial(rl.Shuffled, 3), "seed", [True, "1", None, 0.5]),
    (partial(rl.DifficultyPools, 3), "seed", [True, "1", None, 0.5]),
    (partial(rl.DifficultyPools, 3), "memory", [True, "1", None, 1.0, -1, float("nan")]),
    (partial(rl.DifficultyPools, 3), "pools", [5, None]),
    (rl.RunningBaseline, "decay", [True, "1", None, 1.0, -1, float("nan")]),
    (partial(rl.prompts, ["?"]), "reward", [None, 1.0]),
    (partial(rl.prompts, ["?"]), "expected", [500]),
    (partial(rl.prompts, ["?"]), "advantage", ["grpo"]),
    (partial(rl.function, tasks=["?"]), "solve", [None, 1.0]),
    (rl.constant, "rate", [True, np.True_, "1", None]),
    (partial(rl.lengths.overlong, 10), "tail", [True, "1", None, 0, 0.5, float("nan")]),
    (rl.lengths.short_and_right, "by", [1.0, None]),
    (rl.Evaluation, "env", [None, ["?"]]),
    (partial(rl.Evaluation, PROMPTS), "sampling", [{}, 0.5]),
]


@pytest.mark.parametrize(
    ("make", "name", "value"), [(make, name, value) for make, name, values in LOUD for value in values]
)
def test_a_value_of_another_kind_is_named_where_it_is_given(make: Any, name: str, value: Any) -> None:
    """Later, rollouts have been paid for; and "no" would count as True."""
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be "):
        make(**{name: value})


@pytest.mark.parametrize("value", [True, np.True_, "1", None, -1, float("nan")])
@pytest.mark.parametrize(
    ("make", "name", "setting"),
    [
        (rl.losses.ppo, "low", "clip_low_threshold"),
        (rl.losses.cispo, "high", "clip_high_threshold"),
        (rl.losses.dro, "beta", "beta"),
    ],
)
def test_settings_of_the_servers_losses_are_numbers(make: Any, name: str, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"loss_fn_config '{setting}' must be a finite number >= 0, got "):
        make(**{name: value})


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_that_says_none_is_named(calls: Any) -> None:
    """It was trained as an empty answer."""
    talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    with pytest.raises(ValueError, match=r"^rows\[0\]: messages\[1\]: 'content' is None"):
        rl.conversations([talk], tokenizer())


def test_a_message_without_content_is_named() -> None:
    """Its answer was trained as an empty one."""
    talk = [TALK[0], {"role": "assistant", "text": "8"}]
    with pytest.raises(ValueError, match=r"messages\[1\] has no 'content', only 'role', 'text': rename yours$"):
        rl.conversations([talk], tokenizer())
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert rl.conversations([[TALK[0], {"role": "assistant", "tool_calls": [call]}]], tokenizer())


@pytest.mark.parametrize(("asks", "answers"), [("human", "gpt"), ("user", "model"), ("human", "assistant")])
def test_roles_that_no_template_knows_are_named(asks: str, answers: str) -> None:
    """Rows of which nothing was trained were left out without a word."""
    talk = [{**TALK[0], "role": asks}, {**TALK[1], "role": answers}]
    place, role = (0, asks) if asks == "human" else (1, answers)
    says = rf"messages\[{place}\]: 'role' is '{role}'; it must be one of .*user, assistant, tool: rename yours$"
    with pytest.raises(ValueError, match=rf"^rows\[1\]: {says}"):
        rl.conversations([TALK, talk], tokenizer())
    with pytest.raises(ValueError, match=rf"^{says}"):
        TemplateRenderer(tokenizer()).render_ids(talk, add_generation_prompt=True)
    row = {"prompt": "?", "chosen": "8", "rejected": "9"}
    with pytest.raises(ValueError, match=rf"^rows\[1\]: {says}"):
        rl.pairs([row, {**row, "prompt": talk}], tokenizer())


def test_no_data_and_pairs_of_other_columns() -> None:
    with pytest.raises(ValueError, match="no data to train on"):
        rl.sft(NOBODY, [])
    with pytest.raises(ValueError, match=r"rows\[0\] has no 'prompt': name your columns, which are \['question'\]"):
        rl.pairs([{"question": "?"}], tokenizer())
    with pytest.raises(ValueError, match=r"rows\[1\] must have 'prompt', 'chosen' and 'rejected' by name, got None"):
        rl.pairs([{"prompt": "?", "chosen": "8", "rejected": "9"}, cast(Any, None)], tokenizer())
    with pytest.raises(ValueError, match=r"rows\[0\]\['chosen'\] must be the answer's text, got \["):
        rl.pairs([{"prompt": "?", "chosen": TALK, "rejected": "no"}], tokenizer())


class Priced(Run):
    """Stands for a run and for a reference."""

    async def get_base_model_async(self) -> str:
        return "base"

    async def get_prices(self, base_model: str) -> PricesResponse:
        return PricesResponse(base_model=base_model, price_version="1", rates_uusd_per_mtok={})


def test_a_datum_that_the_base_model_cannot_take_is_named_before_any_step() -> None:
    """One bad datum in a hundred thousand ended the run, at whichever step it came."""
    run, long = cast(Any, Priced(Scripted(), None)), "8 " * 3000
    data = rl.conversations([TALK, TALK, [TALK[0], {**TALK[1], "content": long}]], tokenizer())
    rows = [{"prompt": "?", "chosen": "8", "rejected": each} for each in ("9", "9", long)]
    says = r"^data\[2\] has \d+ tokens, the base model takes 2048: leave it out, or cut it"
    with pytest.raises(ValueError, match=says):
        rl.sft(run, data)
    with pytest.raises(ValueError, match=says):
        rl.dpo(run, rl.pairs(rows, tokenizer()), reference=run)
    with pytest.raises(TypeError, match=r"^data\[1\] must be as rl.conversations or rl.pairs makes it, got {'mess"):
        rl.sft(run, [data[0], cast(Any, {"messages": TALK})])


def test_a_pair_is_refused_where_its_reference_has_no_room_for_the_last_token() -> None:
    """Training predicts the token after a full context, but a scorer has to read that token."""
    run = cast(Any, Priced(Scripted(), None))
    rows = [{"prompt": "?", "chosen": "8", "rejected": each} for each in ("9", "8 " * 3000)]
    pair, exact = rl.pairs(rows, tokenizer())
    inputs = {name: values.to_numpy()[:2048] for name, values in exact.rejected.loss_fn_inputs.items()}
    whole = Datum(ModelInput.from_ints(exact.rejected.model_input.to_ints()[:2048]), inputs)
    with pytest.raises(ValueError, match=r"^data\[1\] has 2049 tokens, the base model takes 2048"):
        rl.dpo(run, [pair, replace(exact, rejected=whole)], reference=run)


def test_a_pair_is_refused_where_its_reference_is_a_model_of_a_shorter_context() -> None:
    class Short(Priced):
        async def get_limits(self) -> LimitsResponse:
            return LimitsResponse(models={"base": ModelLimits(vocab_size=1000, context_length=64)}, losses={})

    run, reference = (cast(Any, kind(Scripted(), None)) for kind in (Priced, Short))
    rows = [{"prompt": "?", "chosen": "8", "rejected": "9 " * 80}]
    with pytest.raises(ValueError, match=r"^data\[0\] has \d+ tokens, the base model takes 64"):
        rl.dpo(run, rl.pairs(rows, tokenizer()), reference=reference)


def test_what_solve_waits_for_in_vain_is_told_as_it_is() -> None:
    async def solve(task: Any, chat: rl.Chat) -> float:
        raise TimeoutError("the database did not answer")

    [outcome] = asyncio.run(rl.function(solve, ["?"]).group("?", [rl.Chat(policy()[0])]))
    assert str(outcome) == "the database did not answer"


def test_an_evaluation_without_money_is_no_reward_of_zero(caplog: pytest.LogCaptureFixture) -> None:
    def evaluated(error: Exception) -> dict[str, float]:
        async def solve(task: Any, chat: rl.Chat) -> float:
            raise error

        return asyncio.run(rl.evaluate(policy()[0], rl.Evaluation(rl.function(solve, ["a", "b"]))))

    with pytest.raises(BudgetSpent, match="no more"):
        evaluated(BudgetSpent("no more"))
    assert evaluated(KeyError("answer")) == {"eval/reward": 0.0, "eval/failed": 2.0}
    assert [r.message for r in caplog.records] == [
        "a rollout of the evaluation failed: KeyError: 'answer' (others like it are only counted)"
    ]


def test_an_evaluation_without_money_is_none_though_code_goes_on_from_any_error() -> None:
    async def solve(task: Any, chat: rl.Chat) -> float:
        try:
            await chat.user("?").sample()
        except Exception:
            return 0.0
        return 1.0

    poor, _ = policy("8")
    poor.purse = Purse({"prefill": 1, "sample": 1}, limit_nusd=0)
    with pytest.raises(BudgetSpent):
        asyncio.run(rl.evaluate(poor, rl.Evaluation(rl.function(solve, ["?"]))))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "gsm8k/1"}, "name: must be of A-Z, a-z, 0-9, '_', '-' and '.'"),
        ({"name": "Größe"}, "name: must be of"),
        ({"name": "a" * 250}, "name: string should have at most 256"),
        ({"name": "a", "ttl_seconds": 60}, "ttl_seconds: input should be greater"),
        ({"name": "a", "every": 0}, "every must be at least 1, got 0"),
    ],
)
def test_checkpoints_that_could_never_be_saved_are_refused_before_the_first_step(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rl.Checkpoints(**given)
    assert rl.Checkpoints("a" * 240).every == 20


def test_an_evaluation_every_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        rl.Evaluation(rl.prompts(["?"]), every=0)
