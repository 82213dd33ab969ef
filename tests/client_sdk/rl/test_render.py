"""Conversations as data, with tokenizers like Llama 2's and Mistral's, where a space belongs to the word after it: the
tokens of a text depend on whether anything comes before it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from weft import rl
from weft.rl.chat.render import TemplateRenderer, _apart
from weft.rl.supervised.dpo import pairs

from tests.client_sdk.rl.kit import tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
#: As in GLM-4.5: the mark of the next speaker ends a turn.
GLM = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}"
    "<|observation|>\n{{ m.content }}{% else %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c).name }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}<tool_call>\n"
#: As these models' own templates write calls.
QWEN2_5 = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}"
    + CALLS
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
QWEN3_CODER = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}" + CALLS + "<function={{ f.name }}>\n{% for name, value in f.arguments|items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
)
TALK = [
    {"role": "user", "content": "What is 3 + 5?"},
    {"role": "assistant", "content": "It is 8."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Goodbye, my friend."},
]
CALL_OF_ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
#: Templates, each with the text that ends a turn of its assistant.
TEMPLATES = [
    pytest.param(CHATML, "<|im_end|>", id="chatml"),
    pytest.param(MISTRAL, "</s>", id="mistral"),
    pytest.param(GLM, "<|user|>", id="glm"),
]


def made(scheme: str, template: str) -> Any:
    """A tokenizer; `scheme` is where it puts a space that is not in the text. Llama 2's does it by a normalizer."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always" if scheme == "legacy" else scheme)
    text = [" ".join(message["content"] for message in TALK), "user assistant [INST] x [/INST]"]
    inner.train_from_iterator(text * 9, trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL, *bytes_]))
    if scheme == "legacy":
        inner.pre_tokenizer = None  # type: ignore[assignment]
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", extra_special_tokens=SPECIAL[4:], chat_template=template
    )


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
@pytest.mark.parametrize("scheme", ["first", "always", "never", "legacy"])
def test_a_conversation_has_the_tokens_of_its_whole_text(scheme: str, template: str, end: str) -> None:
    known = made(scheme, template)
    renderer = TemplateRenderer(known)
    [(ids, sampled)] = renderer.example(TALK)
    text = known.apply_chat_template(TALK, tokenize=False) + (end if template == GLM else "")
    assert ids == known.encode(text, add_special_tokens=False)
    drawn = [token for token, own in zip(ids, sampled, strict=True) if own]
    assert drawn.count(known.convert_tokens_to_ids(end)) == 2  # each answer learns to end
    ends = ["<|user|>", "<|observation|>"] if template == GLM else [end]  # with the second a call ends
    assert renderer.get_stop_token_ids() == known.convert_tokens_to_ids(ends)
    for place in (1, 3):  # each answer comes after the prompt from which it would be sampled
        prompt = renderer.render_ids(TALK[:place], add_generation_prompt=True)
        assert ids[: len(prompt)] == prompt
        assert sampled[len(prompt) - 1 : len(prompt) + 1] == [False, True]
    [pair] = pairs([{"prompt": TALK[:3], "chosen": "Goodbye, my friend.", "rejected": "8."}], known)
    weighed = pair.chosen.loss_fn_inputs["weights"].to_numpy()
    assert weighed.argmax() == len(renderer.render_ids(TALK[:3], add_generation_prompt=True)) - 1


@pytest.mark.parametrize(
    ("talk", "tools", "says"),
    [
        ([*TALK[:1]], [ADD], r"^tools: the chat template .* has no place for them"),
        (
            [*TALK[:1], {"role": "assistant", "content": "", "tool_calls": [CALL_OF_ADD]}],
            None,
            r"messages\[1\]: .* tool_calls",
        ),
        (
            [{"role": "system", "content": "Be brief."}, *TALK[:2]],
            None,
            r"messages\[0\]: .* the role 'system'; say it as",
        ),
        ([*TALK[:2], {"role": "tool", "content": "eight"}, TALK[3]], None, r"messages\[2\]: .* the role 'tool'"),
    ],
)
def test_what_a_template_leaves_out_is_refused(talk: Any, tools: Any, says: str) -> None:
    """A call that is left out would be trained as an empty answer; left-out tools, as if they had never been shown."""
    known = made("first", MISTRAL.replace("{% else %}", "{% elif m.role == 'assistant' %}"))
    with pytest.raises(ValueError, match=says):
        TemplateRenderer(known).render_ids(talk, tools=tools)
    shown = made("first", QWEN2_5 + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}")
    assert TemplateRenderer(shown).render_ids(talk, tools=tools) == known_ids(shown, talk, tools)


def known_ids(known: Any, talk: Any, tools: Any) -> Any:
    return known.encode(known.apply_chat_template(talk, tools=tools, tokenize=False), add_special_tokens=False)


def test_an_answer_that_would_grow_together_with_its_prompt_is_still_behind_it() -> None:
    known = tokenizer()
    [newline], [both] = (known.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
    talk = [TALK[0], {"role": "assistant", "content": "\nIt is 8."}]
    [(ids, sampled)] = TemplateRenderer(known).example(talk)
    prompt = TemplateRenderer(known).render_ids(talk[:1], add_generation_prompt=True)
    assert both in known.apply_chat_template(talk, return_dict=False)
    assert ids[: len(prompt) + 1] == [*prompt, newline]
    assert sampled.index(True) == len(prompt)


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
@pytest.mark.parametrize("scheme", ["first", "always", "never", "legacy"])
def test_a_next_turn_has_the_tokens_of_its_whole_text(scheme: str, template: str, end: str) -> None:
    renderer = TemplateRenderer(made(scheme, template))
    [(ids, sampled)] = renderer.example(TALK[:2])
    prompt = renderer.render_ids(TALK[:1], add_generation_prompt=True)
    drawn = [token for token, own in zip(ids, sampled, strict=True) if own]
    bridged = renderer.bridge_to_next_turn(prompt, drawn, [TALK[2]])
    assert bridged == renderer.render_ids(TALK[:3], add_generation_prompt=True)


def test_an_answer_is_trained_behind_a_system_message_that_the_template_shows_at_the_end_alone() -> None:
    """Mistral-7B-Instruct-v0.3's shows it with the last message, if that is a user's."""
    shown = "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    late = MISTRAL.replace("{% else %}", "{% elif m.role == 'assistant' %}").replace("[INST] ", "[INST] " + shown)
    known = made("first", late)
    talk = [{"role": "system", "content": "Be my friend."}, *TALK]
    first, last = TemplateRenderer(known).example(talk)
    for place, answer, (ids, sampled) in ((2, "It is 8.", first), (4, "Goodbye, my friend.", last)):
        prompt = known.apply_chat_template(talk[:place], tokenize=False)
        assert "[INST] Be my friend.\n\n" + talk[place - 1]["content"] in prompt
        assert ids == known.encode(f"{prompt} {answer}</s>", add_special_tokens=False)
        assert sampled == [False] * len(known.encode(prompt, add_special_tokens=False)) + [True] * sum(sampled)
    twice = "What is 3 + 5? [/INST] and [INST] What is 3 + 5? [/INST] 8"  # which tells how its prompt ends
    [(ids, sampled)] = TemplateRenderer(known).example([*talk[:2], {"role": "assistant", "content": twice}])
    assert known.decode([token for token, own in zip(ids, sampled, strict=True) if own]).strip() == twice + "</s>"


def test_a_turn_ends_once_also_where_the_history_writes_its_end_otherwise() -> None:
    """As in gpt-oss's template: <|return|> ends an answer, and <|end|> the same answer in a history."""
    ended = CHATML.replace("}}<|im_end|>\n", "}}{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}")
    known = made("first", ended)
    renderer = TemplateRenderer(known)
    prompt = renderer.render_ids(TALK[:1], add_generation_prompt=True)
    whole = known.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    for end, written in (("</s>", "</s>"), ("<|im_end|>", "<|im_end|>"), ("", "<|im_end|>")):
        drawn = known.encode("It is 8." + end, add_special_tokens=False)
        bridged = renderer.bridge_to_next_turn(prompt, drawn, [TALK[2]])
        assert bridged is not None
        expected = whole.replace("8.<|im_end|>", "8." + written)
        assert known.decode(bridged).split() == known.decode(known.encode(expected, add_special_tokens=False)).split()


def test_a_call_ends_where_its_result_begins() -> None:
    """A model that never learns to stop after a call writes one call after the other."""
    known = made("first", GLM)
    call = {"role": "assistant", "content": "add", "tool_calls": [{"name": "add", "arguments": {}}]}
    talk = [TALK[0], call, {"role": "tool", "content": "8"}, TALK[1]]
    for said, ends in ((talk, ["<|observation|>", "<|user|>"]), (talk[:2], ["<|observation|>"])):
        [(ids, sampled)] = TemplateRenderer(known).example(said)
        drawn = [token for token, own in zip(ids, sampled, strict=True) if own]
        assert [word for word in known.convert_ids_to_tokens(drawn) if word in SPECIAL] == ends
    thinking = GLM.replace("<|assistant|>\n{{", "<|assistant|>\n{% if loop.last %}It is {% endif %}{{")
    first, last = TemplateRenderer(made("first", thinking)).example(TALK)  # for which the history has another text
    for ids, sampled in (first, last):
        assert (known.convert_ids_to_tokens(ids[-1]), sampled[-1]) == ("<|user|>", True)


def test_parts_of_a_message_are_its_text_and_what_is_no_text_is_refused() -> None:
    """Left out without a word, an answer would be trained on a question without its picture."""
    renderer = TemplateRenderer(made("first", CHATML))
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 5?"}]
    assert renderer.example([{"role": "user", "content": parts}, *TALK[1:]]) == renderer.example(TALK)
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValueError, match="'user' message has a part of type 'image_url'"):
        rl.conversations([[{"role": "user", "content": [*parts, picture]}, TALK[1]]], renderer.tokenizer)


def test_calls_are_those_that_the_format_has_also_in_text_that_is_no_call() -> None:
    form, chance = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S), random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "{", "}", '"a"', " ", "\n", "{}"]
    for _ in range(5000):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 14)))
        assert _apart(text) == (form.sub("", text), [found[1] for found in form.finditer(text)])


@pytest.mark.parametrize("piece", ["<tool_call>{", "<tool_call>{}", "<tool_call> ", "<tool_call>{ } "])
def test_calls_that_a_model_begins_over_and_over_are_read_once(piece: str) -> None:
    """Every other rollout waits meanwhile: with the square of the calls' number, for minutes."""
    assert _apart(piece * 20_000) == (piece * 20_000, [])


@pytest.mark.parametrize("said", ["It is 7, no, 8.</think>\n\n8<|im_end|>", "\n</think>8<|im_end|>"])
def test_a_thought_that_the_template_has_begun_is_no_part_of_the_answer(said: str) -> None:
    """As with models that always think (DeepSeek-R1, Qwen3-Thinking): their prompts end within the thought."""
    known = made("first", CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    parsed = TemplateRenderer(known).parse_response(known.encode(said, add_special_tokens=False))
    assert (parsed.content, parsed.reasoning_content) == ("8", said.partition("</think>")[0].strip())
    other = TemplateRenderer(made("first", CHATML))  # which has begun none
    assert other.parse_response(known.encode(said, add_special_tokens=False)).reasoning_content is None


#: Parts of templates whose prompt begins a thought. The text for an answer's thought `r` and its rest `c` is put in.
BEGUN = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}"
    "<|observation|>\n{{ m.content }}{% else %}<|assistant|>"
    "{% set c, r = m.content, m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set c, r = c.split('</think>')[-1].lstrip(), c.split('</think>')[0].split('<think>')[-1].strip() %}{% endif %}"
    "WRITTEN{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>PROMPT{% endif %}"
)
THINKING = [
    pytest.param("<think>\n", "{{ c }}</s>", "<think>\n{}\n</think>\n\n8</s>", id="deepseek-r1, qwq"),
    pytest.param(
        "<think>",
        "{% if r and loop.last %}<think>{{ r }}</think>{% else %}</think>{% endif %}{{ c }}",
        "<think>{}</think>8<|user|>",
        id="glm-4.7-flash",
    ),
    pytest.param(
        "<think>\n",
        "{% if r and loop.last %}<think>\n{{ r }}\n</think>\n{% else %}<think></think>{% endif %}{{ c }}</s>\n",
        "<think>\n{}\n</think>\n8</s>",
        id="nemotron-3",
    ),
    pytest.param(
        "<think>\n",
        "{% if loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}</s>\n",
        "<think>\n{}\n</think>\n\n8</s>",
        id="qwen3-thinking",
    ),
]


@pytest.mark.parametrize(("prompt", "written", "wanted"), THINKING)
@pytest.mark.parametrize("thought", ["", "It is 7, no, 8."])
@pytest.mark.parametrize("inside", [True, False], ids=["in the content", "by itself"])
def test_an_answer_is_trained_behind_the_thought_that_its_prompt_begins(
    prompt: str, written: str, wanted: str, thought: str, inside: bool
) -> None:
    """Even if the template leaves out thoughts, or writes an answer without a thought as no prompt begins it."""
    known = made("first", BEGUN.replace("WRITTEN", written).replace("PROMPT", prompt))
    renderer, parts = TemplateRenderer(known), {"content": "8"}
    if thought:
        parts = {"content": f"<think>{thought}</think>8"} if inside else {"content": "8", "reasoning_content": thought}
    talk = [*TALK[:1], {"role": "assistant", **parts}, TALK[2], {"role": "assistant", **parts}]
    examples = renderer.example(talk)
    assert len(examples) == 2
    for place, (ids, sampled) in zip((1, 3), examples, strict=True):
        asked = renderer.render_ids(talk[:place], add_generation_prompt=True)
        assert ids[: len(asked)] == asked
        assert sampled.index(True) == len(asked)
        drawn = ids[: max(at for at, own in enumerate(sampled) if own) + 1]
        text = known.apply_chat_template(talk[:place], tokenize=False, add_generation_prompt=True)
        whole = text.removesuffix(prompt) + wanted.format(thought)
        squeezed = (
            "".join(known.decode(each).split()) for each in (drawn, known.encode(whole, add_special_tokens=False))
        )
        assert next(squeezed) == next(squeezed)
        parsed = renderer.parse_response(drawn[len(asked) :])
        assert (parsed.content, parsed.reasoning_content) == ("8", thought)
    ends = ["<|user|>", "<|observation|>"] if prompt == "<think>" else ["</s>"]
    assert renderer.get_stop_token_ids() == known.convert_tokens_to_ids(ends)


@pytest.mark.parametrize(("begun", "said"), [("<think>\n", "It is 8, or"), ("", "<think>It is 8, or")])
def test_a_thought_that_was_cut_off_is_no_answer(begun: str, said: str) -> None:
    """A reward that looks for 8 would pay for it."""
    known = made("first", CHATML.replace("assistant\n{% endif", f"assistant\n{begun}{{% endif"))
    parsed = TemplateRenderer(known).parse_response(known.encode(said, add_special_tokens=False))
    assert (parsed.content, parsed.reasoning_content) == ("", "It is 8, or")


def test_a_template_that_takes_a_result_behind_its_call_alone_is_asked_for_the_whole() -> None:
    """The part that is rendered to go on contains no calls, and such templates raise for it."""
    refusing = "{% if m.role == 'tool' and not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    known = made("first", CHATML.replace("{{ m.content }}", refusing + "{{ m.content }}"))
    renderer = TemplateRenderer(known)
    result = {"role": "tool", "name": "add", "content": "8"}
    assert renderer.bridge_to_next_turn([5], [6], [result]) is None
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert renderer.render_ids([*TALK[:1], {"role": "assistant", "content": "", "tool_calls": [call]}, result])
    assert renderer.bridge_to_next_turn([5], [6], [{"role": "user", "content": "8"}]) is not None


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3_CODER], ids=["qwen2.5", "qwen3-coder"])
def test_arguments_are_an_object_to_the_template_also_where_openai_writes_text(template: str) -> None:
    """Templates that write arguments as JSON would write a quoted string, and a model would learn to call so."""
    renderer = TemplateRenderer(made("first", template))

    def talk(arguments: Any, flat: bool = False) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": arguments}
        call = function if flat else {"id": "1", "type": "function", "function": function}
        return [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]

    wanted = renderer.render_ids(talk({"a": 3, "b": [5]}))
    for flat in (False, True):
        assert renderer.render_ids(talk('{"a": 3, "b": [5]}', flat)) == wanted
    assert renderer.example(talk('{"a": 3, "b": [5]}'))[0][0] == wanted
    if template == QWEN2_5:  # what is not an object stays as it is
        assert '"{a"' in renderer.tokenizer.decode(renderer.render_ids(talk("{a")))


def test_what_a_message_does_not_have_is_not_shown_to_the_template() -> None:
    """Rows of a data set have all fields of all rows, and templates such as Llama 3.1's look which fields there are."""
    asking = "{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}{{ 1 / 0 }}{% endif %}{% endif %}"
    renderer = TemplateRenderer(made("first", CHATML.replace("{{ m.content }}", asking + "{{ m.content }}")))
    assert renderer.render_ids([{**each, "tool_calls": None} for each in TALK]) == renderer.render_ids(TALK)
