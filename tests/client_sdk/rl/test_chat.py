"""`rl.Chat`: what is trained is what was sampled, token for token."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from weft.rl.chat.chat import Chat, ContextFullError, Reply, StaleError, answers_together
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.chat.render import TemplateRenderer
from weft.rl.envs.environment import Reward, function, prompts
from weft.rl.rollout import Rollout, data_of, join
from weft.rl.supervised.conversations import conversations

from tests.client_sdk.rl.kit import Said, policy, tokenizer


def rendered(*messages: tuple[str, str]) -> list[int]:
    given = [{"role": role, "content": content} for role, content in messages]
    ids = tokenizer().apply_chat_template(given, add_generation_prompt=True, return_dict=False)
    return list(ids)


def test_turns_are_what_the_template_would_render_and_make_one_datum() -> None:
    who, sampler = policy("4", "no, 5")

    async def talk() -> Chat:
        chat = Chat(who)
        first = await chat.system("You add.").user("What is 2 + 2?").sample(max_tokens=8)
        assert (first.text, first.stop_reason) == ("4", "stop")
        await chat.user("Sure?").sample()
        return chat

    chat = asyncio.run(talk())
    system, question = ("system", "You add."), ("user", "What is 2 + 2?")
    assert sampler.asked == [
        rendered(system, question),
        rendered(system, question, ("assistant", "4"), ("user", "Sure?")),
    ]
    assert sampler.params[0].max_tokens == 8
    assert sampler.params[0].seed != sampler.params[1].seed
    [datum] = data_of(Rollout(chat.recorded), 1.0)
    [joined] = join(chat.recorded)
    assert datum.model_input.to_ints() == joined.tokens[:-1]
    drawn = [token for token, own in zip(joined.tokens, joined.drawn, strict=True) if own]
    assert tokenizer().decode(drawn) == "4<|im_end|>no, 5<|im_end|>"


def test_a_chat_that_replays_asks_for_experts_and_keeps_them() -> None:
    said = Said([40, 41], "length")
    said.routed_experts_np = np.full((9, 2, 2), 7)
    who, sampler = policy(said)
    plain = asyncio.run(Chat(who).user("?").sample()).turn
    assert plain.routed_experts is None
    assert "return_routed_experts" not in sampler.more[0]
    who, sampler = policy(said, "no experts")
    who.routing_replay = True
    turn = asyncio.run(Chat(who).user("?").sample()).turn
    assert turn.routed_experts is not None
    assert turn.routed_experts.dtype == np.uint16  # two bytes each while they wait
    assert turn.routed_experts.shape == (9, 2, 2)
    assert sampler.more[0]["return_routed_experts"] is True
    with pytest.raises(ValueError, match="returned no experts"):
        asyncio.run(Chat(who).user("?").sample())


def test_tokens_that_no_encoder_would_give_come_back_as_they_were() -> None:
    """The model spells "ab" as a, b; encoding its text would give another token."""
    odd = [tokenizer().encode("t")[0], tokenizer().encode("h")[0], tokenizer().encode("e")[0]]
    assert tokenizer().encode(tokenizer().decode(odd)) != odd
    who, sampler = policy(Said(odd, "length"), "ok")

    async def talk() -> None:
        chat = Chat(who).user("?")
        await chat.sample()
        await chat.user("go on").sample()

    asyncio.run(talk())
    first, second = sampler.asked
    assert second[: len(first) + 3] == first + odd
    assert tokenizer().decode(second[len(first) + 3 :]).startswith("<|im_end|>\n<|im_start|>user\ngo on")


def test_a_rewritten_history_begins_a_new_datum() -> None:
    who, _ = policy("a", "b", "c")

    async def talk() -> Chat:
        chat = Chat(who).user("1")
        await chat.sample()
        await chat.user("2").sample()
        chat.rewrite([{"role": "user", "content": "in short: 1, 2"}])
        await chat.sample()
        return chat

    assert [sum(joined.drawn) for joined in join(asyncio.run(talk()).recorded)] == [4, 2]


def test_a_thought_is_kept_for_templates_that_show_it_in_the_history() -> None:
    """As Qwen3's and GLM-4.6's do between a call and the answer to its result: a conversation that is rendered anew
    contains the policy's thought, as its ids would."""
    known = copy.deepcopy(tokenizer())
    shown = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    known.chat_template = known.chat_template.replace("{%- for call in", f"{{{{- '' }}}}{shown}{{%- for call in", 1)
    who, sampler = policy('<think>plan A</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', "8")

    async def talk() -> Chat:
        chat = Chat(replace(who, renderer=TemplateRenderer(known))).user("?")
        [call] = (await chat.sample()).tool_calls
        chat.tool(call, 8)
        await chat.rewrite(chat.messages).sample()
        return chat

    thoughts = [message.get("reasoning_content") for message in asyncio.run(talk()).messages]
    assert thoughts == [None, "plan A", None, None]
    assert "<think>plan A</think>" in tokenizer().decode(sampler.asked[1])


def test_agents_of_a_rollout_are_conversations_of_their_own() -> None:
    who, _ = policy("x", "y", "z")

    async def talk() -> Chat:
        chat = Chat(who).user("write")
        critic = chat.agent("critic").user("judge")
        await chat.sample()
        await critic.sample()
        await chat.user("again").sample()
        return chat

    chat = asyncio.run(talk())
    assert [turn.agent for turn in chat.recorded] == ["", "critic", ""]
    assert [sum(joined.drawn) for joined in join(chat.recorded)] == [4, 2]


def test_agents_of_one_name_draw_each_for_themselves() -> None:
    """Several tries of the same prompt are several draws, like several samples of a chat."""
    drawn, sampler = policy(*"abcd")
    chat = Chat(drawn, "seed")
    tries = [chat.agent("try"), chat.agent("try"), chat.agent("other"), Chat(drawn, "seed").agent("try")]
    for each in tries:
        asyncio.run(each.user("?").sample())
    first, second, other, again = (params.seed for params in sampler.params)
    assert len({first, second, other}) == 3
    assert again == first


def test_a_group_asks_once_and_each_gets_its_own() -> None:
    who, sampler = policy("1", "2", "3")
    chats = [Chat(who).user("q") for _ in range(3)]
    replies = asyncio.run(answers_together(chats, None, None))
    assert [reply.text for reply in replies if isinstance(reply, Reply)] == ["1", "2", "3"]
    assert len(sampler.asked) == 1
    assert [len(chat.recorded) for chat in chats] == [1, 1, 1]


def test_a_stale_answer_of_a_group_is_that_rollouts_own() -> None:
    who, _ = policy(Said([40], "length", stale=True), "yes", "no")
    env = prompts(["?"], lambda text, task: float(text == "yes"))
    chats = [Chat(who) for _ in range(3)]
    stale, *others = asyncio.run(env.group("?", chats))
    assert isinstance(stale, StaleError)
    assert others == [Reward(1.0), Reward(0.0)]
    assert [len(chat.recorded) for chat in chats] == [1, 1, 1]


def test_tool_calls_and_thoughts_are_read() -> None:
    text = '<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    broken = "<tool_call>\n{not json}\n</tool_call>"
    renderer = TemplateRenderer(tokenizer())
    parsed = renderer.parse_response(tokenizer().encode(text + "<|im_end|>"))
    assert (parsed.content, parsed.reasoning_content) == ("Look:", "hm")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1})]
    assert renderer.parse_response(tokenizer().encode(broken)).tool_calls[0].arguments is None
    deep = '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "}</tool_call>"
    assert renderer.parse_response(tokenizer().encode(deep)).tool_calls[0].arguments is None


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_with_nan_or_infinity_is_no_call(number: str) -> None:
    text = f'<tool_call>{{"name": "pay", "arguments": {{"dollars": [{number}]}}}}</tool_call>'
    [call] = TemplateRenderer(tokenizer()).parse_response(tokenizer().encode(text)).tool_calls
    assert call.arguments is None


def test_a_tool_loop() -> None:
    who, sampler = policy('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "5")

    async def solve(task: Any, chat: Chat) -> Reward:
        reply = await chat.user(task["q"]).sample()
        while reply.tool_calls:
            for call in reply.tool_calls:
                assert call.arguments is not None
                chat.tool(call, call.arguments["a"] + call.arguments["b"])
            reply = await chat.sample()
        return Reward(float(reply.text == task["a"]), {"turns": chat.turns})

    env = function(solve, [{"q": "2 + 3", "a": "5"}])
    [outcome] = asyncio.run(env.group(env.tasks[0], [Chat(who)]))
    assert outcome == Reward(1.0, {"turns": 2})
    assert "<tool_response>\n5\n</tool_response><|im_end|>" in tokenizer().decode(sampler.asked[1])


def test_a_rollout_that_takes_too_long_or_fails_is_that_rollouts_own() -> None:
    async def solve(task: Any, chat: Chat) -> float:
        if task == "slow":
            await asyncio.sleep(30)
        raise KeyError("x")

    env = function(solve, ["slow", "bad"], timeout_s=0.05)
    [slow] = asyncio.run(env.group("slow", [Chat(policy()[0])]))
    [bad] = asyncio.run(env.group("bad", [Chat(policy()[0])]))
    assert "longer than 0.05 s, after 0 turns" in str(slow)
    assert isinstance(bad, KeyError)


@pytest.mark.parametrize("errors", [BaseException, asyncio.CancelledError])
def test_a_rollout_that_takes_too_long_has_no_reward_though_its_code_goes_on(errors: type[BaseException]) -> None:
    """The code goes on after a bare `except:` around the call of a model, for example."""

    async def solve(task: str, chat: Chat) -> float:
        try:
            await asyncio.sleep(30)
        except errors:
            return 0.0
        return 1.0

    [found] = asyncio.run(function(solve, ["slow"], timeout_s=0.05).group("slow", [Chat(policy()[0])]))
    assert "longer than 0.05 s" in str(found)


class Unclosed:
    """Sandboxes whose provider fails, or takes for ever, to close one."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s

    async def create(self, snapshot: Any = None) -> Any:
        return self

    async def close(self) -> None:
        await asyncio.sleep(self.takes_s)
        raise RuntimeError("502 Bad Gateway")


@pytest.mark.parametrize(
    ("takes_s", "told"),
    [
        (0.0, "a sandbox was not closed, and goes on until its provider ends it: RuntimeError: 502 Bad Gateway"),
        (30.0, "a sandbox was not closed by the end of timeout_s (0.2 s), and goes on until its provider ends it"),
    ],
    ids=["fails", "hangs"],
)
def test_a_sandbox_that_cannot_be_closed_takes_no_reward_with_it(
    takes_s: float, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def solve(task: str, chat: Chat, sandbox: Any) -> float:
        if task == "bad":
            raise KeyError("no such column")
        return 1.0

    env = function(solve, ["good", "bad"], timeout_s=0.2, sandboxes=Unclosed(takes_s))  # type: ignore[arg-type]
    [good] = asyncio.run(env.group("good", [Chat(policy()[0])]))
    assert good == Reward(1.0)
    assert told in caplog.messages
    if not takes_s:  # nor does it hide the rollout's own error
        [bad] = asyncio.run(env.group("bad", [Chat(policy()[0])]))
        assert isinstance(bad, KeyError)


def test_time_in_which_nothing_could_run_does_not_end_a_rollout() -> None:
    """A reward that computes for long, or Ctrl-Z, holds up all rollouts, none of which is to blame."""

    async def solve(task: str, chat: Chat) -> float:
        if task == "holds":
            time.sleep(1.0)  # noqa: ASYNC251 (what they do)
        await asyncio.sleep(0.05)
        return 1.0

    env = function(solve, ["waits", "holds"], timeout_s=0.5)

    async def both() -> list[Any]:
        found = await asyncio.gather(*(env.group(task, [Chat(policy()[0])]) for task in env.tasks))
        return [outcome for outcomes in found for outcome in outcomes]

    assert [getattr(outcome, "value", outcome) for outcome in asyncio.run(both())] == [1.0, 1.0]


def test_prompts_of_texts_messages_and_judges_that_wait() -> None:
    async def judge(text: str, task: Any) -> float:
        return float(text == "yes")

    who, sampler = policy("yes", "no", "yes", "yes")
    env = prompts(["plain", {"prompt": [{"role": "user", "content": "listed"}]}], judge, system="S")
    first = asyncio.run(env.group(env.tasks[0], [Chat(who), Chat(who)]))
    second = asyncio.run(env.group(env.tasks[1], [Chat(who), Chat(who)]))
    assert [outcome.value for outcome in [*first, *second] if isinstance(outcome, Reward)] == [1, 0, 1, 1]
    assert sampler.asked == [rendered(("system", "S"), ("user", text)) for text in ("plain", "listed")]


def test_limits_are_named() -> None:
    who, _ = policy(Said([1], stale=True), context=30)
    with pytest.raises(ValueError, match="nothing was added"):
        asyncio.run(Chat(who).sample())
    with pytest.raises(ContextFullError, match="the model takes 30"):
        asyncio.run(Chat(who).user("word " * 40).sample())
    with pytest.raises(StaleError):
        asyncio.run(Chat(who).user("?").sample())


def test_the_purse_is_asked_for_the_most_and_charged_what_it_was() -> None:
    who, _ = policy("7", "8")
    who.purse = Purse({"prefill": 1_000_000, "cached_prefill": 0, "sample": 10_000_000}, limit_nusd=1_000_000)
    chat = Chat(who).user("?")
    read = len(chat.prompt())
    asyncio.run(chat.sample(max_tokens=50))
    assert who.purse.spent_nusd == read * 1000 + 2 * 10_000
    assert who.purse.held_nusd == 0
    with pytest.raises(BudgetSpent, match="could be passed"):
        asyncio.run(chat.user("?").sample(max_tokens=100))
    assert who.purse.held_nusd == 0


def test_what_is_under_way_counts_at_the_most_that_it_can_cost() -> None:
    purse = Purse({"sample": 1_000_000}, limit_nusd=10_000)
    first = purse.hold(purse.price(sample=6))
    with pytest.raises(BudgetSpent, match=r"\$0.000006000 held"):
        purse.hold(purse.price(sample=5))
    purse.settle(first, purse.price(sample=1))
    second = purse.hold(purse.price(sample=9))
    purse.settle(second, second)
    assert (purse.spent_nusd, purse.held_nusd) == (10_000, 0)


def test_examples_train_what_would_be_sampled() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    [(ids, sampled)] = TemplateRenderer(tokenizer()).example(messages)
    assert ids == tokenizer().apply_chat_template(messages, return_dict=False)
    trained = [token for token, own in zip(ids, sampled, strict=True) if own]
    assert tokenizer().decode(trained) == "b<|im_end|>d<|im_end|>"


def test_calls_of_tools_are_trained_behind_the_tools_that_the_template_shows() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "one"},
    ]
    [datum] = conversations([messages], tokenizer(), tools=[tool])
    ids = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
    assert ids == tokenizer().apply_chat_template(messages, tools=[tool], return_dict=False)
    own = datum.loss_fn_inputs["weights"].to_numpy() == 1
    trained = tokenizer().decode(np.asarray(ids[1:])[own].tolist())
    assert trained == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>one<|im_end|>'


class Forgetful:
    """A tokenizer whose template drops the thoughts of earlier answers, as Qwen3's does."""

    def __init__(self) -> None:
        self._inner = tokenizer()
        self.all_special_ids = self._inner.all_special_ids

    def encode(self, text: str, **options: Any) -> Any:
        return self._inner.encode(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        ends = messages[-1]["role"] == "assistant"
        kept = [
            {**m, "content": m["content"].split("</think>")[-1]}
            if m["role"] == "assistant" and not (i == last and ends)
            else m
            for i, m in enumerate(messages)
        ]
        return self._inner.apply_chat_template(kept, **options)


def test_a_template_that_rewrites_history_gives_an_example_for_each_answer() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>1</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>2</think>d"},
    ]
    examples = TemplateRenderer(Forgetful()).example(messages)
    trained = [[t for t, own in zip(*example, strict=True) if own] for example in examples]
    assert [tokenizer().decode(ids) for ids in trained] == [
        "<think>1</think>b<|im_end|>",
        "<think>2</think>d<|im_end|>",
    ]
    assert "1</think>" not in tokenizer().decode(examples[1][0])
