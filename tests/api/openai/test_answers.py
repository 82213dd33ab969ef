"""Answers in OpenAI's and vLLM's form: the memory that writing them takes, and numbers of any size."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message
from weft.wire import SamplingParams
from weft.wire.binary.sample_codec import (
    PolicySpan,
    SampleResult,
    SequenceResult,
    TopkLogprobs,
    encode_sample_response,
)

from api.operations import streaming
from api.routes.openai import waiting
from api.routes.openai.answers import Form, base85, choice_of, envelope, logprobs_of, routed_of, rows_of_part, whole
from api.routes.openai.asking import Asked
from api.routes.openai.text import ModelText
from api.state.afterwards import Afterwards
from api.state.large_bodies import LargeBodies
from api.state.polls import LongPolls
from scheduler.links.messages import DrawnTokens
from scheduler.order.operations import Outcome
from workers.model.tiny import TINY_PATH

TOKENS, TOP = 2000, 20
#: Bytes of each log-probability, which api/routes/openai/asking.py counts on.
MOST_BYTES = 320


def drawn() -> SequenceResult:
    draw = np.random.default_rng(0)
    tops = draw.integers(0, 1500, (TOKENS, TOP)).astype(np.int32), -draw.random((TOKENS, TOP)).astype(np.float32)
    tokens = draw.integers(0, 1500, TOKENS).astype(np.int32)
    return SequenceResult(tokens, np.full(TOKENS, -1, np.float32), "length", TopkLogprobs(*tops))


def test_an_answer_takes_the_memory_that_its_limit_counts_on() -> None:
    form, result = Form(ModelText(TINY_PATH, 2048), chat=True, logprobs=True, top=TOP), SampleResult([drawn()])
    whole([form], "id", "model", [[1]], [result])  # the tokens' texts are kept
    tracemalloc.start()
    written = orjson.dumps(whole([form], "id", "model", [[1]], [result]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES * TOKENS * (1 + TOP)
    (entries,) = (choice["logprobs"]["content"] for choice in orjson.loads(written)["choices"])
    sequence = result.sequences[0]
    assert [len(entry["top_logprobs"]) for entry in entries] == [TOP] * TOKENS
    told = [[cell["logprob"] for cell in entry["top_logprobs"]] for entry in entries]
    np.testing.assert_array_equal(np.float32(told), sequence.topk.logprobs)  # type: ignore[union-attr]


@pytest.mark.parametrize("words", ["日本 😀", "naïve", "\ufffd", "plain<|im_end|>"])
def test_bytes_of_tokens_are_those_of_their_text(words: str) -> None:
    """A character may have several tokens, none of which is text by itself: clients join their bytes."""
    form = Form(ModelText(TINY_PATH, 2048), chat=True, logprobs=True)
    tokens = form.text.encode(words)
    entries = orjson.loads(orjson.dumps(logprobs_of(form, tokens, [-1.0] * len(tokens), [])))["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == words


def test_of_tokens_that_read_alike_the_likeliest_is_told() -> None:
    """Parts of characters all read as U+FFFD, and a completion lists the likeliest tokens by their text."""
    form = Form(ModelText(TINY_PATH, 2048), chat=False, logprobs=True, top=2)
    part, other = form.text.encode("😀")[:2]
    told = logprobs_of(form, [part], [-0.5], [[(part, -0.5), (other, -9.0)]])
    assert orjson.loads(orjson.dumps(told))["top_logprobs"] == [{"\ufffd": -0.5}]


def test_a_completion_tells_the_drawn_token_among_the_likeliest() -> None:
    """As OpenAI's API says of `logprobs`: up to one more token than was asked for."""
    form = Form(ModelText(TINY_PATH, 2048), chat=False, logprobs=True, top=1)
    eight, nine = (form.text.encode(word)[0] for word in ("8", "9"))
    told = orjson.loads(orjson.dumps(logprobs_of(form, [nine, eight], [-3.0, -0.1], [[(eight, -0.1)]] * 2)))
    assert told["top_logprobs"] == [{"8": -0.1, "9": -3.0}, {"8": -0.1}]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("sizes", [[1000], [1], [3, 1, 2]], ids=["whole", "one by one", "in parts"])
def test_offsets_are_places_in_the_text_that_is_sent(sizes: list[int], spelled: bool) -> None:
    """Parts of a character begin where it does; special tokens that are left out take no place."""
    form = Form(ModelText(TINY_PATH, 2048), chat=False, logprobs=True, spelled=spelled)
    tokens = form.text.encode("3 😀<|im_start|>naïve 日本<|im_end|> 😀!")
    places, found, left = form.places(), list[int](), list(tokens)
    for size in itertools.cycle(sizes):
        part, left = left[:size], left[size:]
        found += logprobs_of(form, part, [-1.0] * len(part), [], places)["text_offset"]
        if not left:
            break
    spelled_out = [form.text.bytes_of(token) if form.decode([token]) else b"" for token in tokens]
    before = [b"".join(spelled_out[:at]).decode(errors="ignore") for at in range(len(tokens))]
    assert found == [len(text) for text in before]


@pytest.mark.parametrize("chat", [True, False])
def test_logprobs_name_tokens_by_their_ids_where_asked_to(chat: bool) -> None:
    """A token's text does not tell which one it was: parts of characters all read as U+FFFD."""
    form = Form(ModelText(TINY_PATH, 2048), chat=chat, logprobs=True, top=2, numbered=True)
    part, other = form.text.encode("😀")[:2]
    told = orjson.loads(orjson.dumps(logprobs_of(form, [part], [-0.5], [[(part, -0.5), (other, -9.0)]])))
    if chat:
        (entry,) = told["content"]
        assert entry["token"] == f"token_id:{part}"
        assert [cell["token"] for cell in entry["top_logprobs"]] == [f"token_id:{part}", f"token_id:{other}"]
    else:
        assert told["tokens"] == [f"token_id:{part}"]
        assert told["top_logprobs"] == [{f"token_id:{part}": -0.5, f"token_id:{other}": -9.0}]


def test_a_whole_answer_in_the_form_of_completions_and_with_all_that_was_asked_for() -> None:
    form = Form(ModelText(TINY_PATH, 2048), chat=False, ids=True)
    nan = float("nan")
    prompt, drawn = form.text.encode("12"), np.array(form.text.encode("345"), np.int32)
    one, two = prompt
    tops = TopkLogprobs(np.array([[0, 0], [one, two]], np.int32), np.array([[nan, nan], [-0.5, -2]], np.float32))
    sequence = SequenceResult(drawn, None, "length", policy=(PolicySpan(7, 3),), stale=True)
    logprobs = np.array([nan, -2], np.float32)
    result = SampleResult([sequence, sequence], logprobs, 1, tops)
    answer = whole([form], "r", "m", [prompt], [result])
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-r", "text_completion", "m")
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (index, "345", "length") for index in range(2)
    ]
    (policy,) = {orjson.dumps(choice["weft"]) for choice in answer["choices"]}
    assert orjson.loads(policy) == {"policy_versions": [[7, 3]], "stale": True}
    assert [choice["token_ids"] for choice in answer["choices"]] == [drawn.tolist()] * 2
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert answer["prompt_token_ids"] == prompt
    assert answer["prompt_logprobs"] == [None, {str(two): {"logprob": -2.0}, str(one): {"logprob": -0.5}}]
    own = whole([form], "r", "m", [prompt], [SampleResult([sequence], logprobs)])
    assert own["prompt_logprobs"] == [None, {str(two): {"logprob": -2.0}}]


def test_a_whole_answer_in_the_form_of_chats_with_nothing_that_was_not_asked_for() -> None:
    form = Form(ModelText(TINY_PATH, 2048), chat=True)
    drawn = np.array(form.text.encode("345<|im_end|>"), np.int32)
    answer = whole([form], "r", "m", [[1]], [SampleResult([SequenceResult(drawn, None, "stop")])])
    assert (answer["id"], answer["object"]) == ("chatcmpl-r", "chat.completion")
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
            "message": {"role": "assistant", "content": "345", "refusal": None},
        }
    ]
    assert envelope(form, "r", "m", chunk=True)["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(("top", "told"), [(0, 1), (2, 3)])
def test_what_logprobs_cost_and_how_those_of_a_part_are_told(top: int, told: int) -> None:
    form = Form(ModelText(TINY_PATH, 2048), chat=False, logprobs=True, top=top)
    assert (form.told, Form(form.text, chat=False, top=top).told) == (told, 0)
    eight, nine = (form.text.encode(word)[0] for word in ("8", "9"))
    tops = [([eight, nine], [-0.5, -1.0])] * 2 if top else []
    part = DrawnTokens(0, 0, [nine, eight], [-1.0, -0.5], [3, 3], tops)
    found = orjson.loads(orjson.dumps(logprobs_of(form, *rows_of_part(part))))
    assert found == {
        "tokens": ["9", "8"],
        "token_logprobs": [-1.0, -0.5],
        "top_logprobs": [{"8": -0.5, "9": -1.0}] * 2 if top else None,
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize(("one_call", "calls"), [(False, ["1", "2"]), (True, ["1"])])
def test_without_parallel_calls_the_first_is_told(one_call: bool, calls: list[str]) -> None:
    """A program that runs one tool at a time would take a second call for an error."""
    form = Form(ModelText(TINY_PATH, 2048), chat=True, tools=True, one_call=one_call)
    said = "".join(f'<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in (1, 2))
    tokens = np.array(form.text.encode(said), np.int32)
    message = choice_of(form, 0, SequenceResult(tokens, None, "stop"))["message"]
    assert [json.loads(call["function"]["arguments"])["a"] for call in message["tool_calls"]] == list(map(int, calls))


@pytest.mark.parametrize("raw", [b"", b"\0\0\0\0", b"\xff" * 8, bytes(range(256))])
def test_base_85_is_pythons(raw: bytes) -> None:
    assert base85(np.frombuffer(raw, ">u4")) == base64.b85encode(raw).decode()


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (511, "uint16")])
def test_experts_of_any_number_are_told(largest: int, dtype: str) -> None:
    experts = np.array([[[0, largest]]], np.int64)
    sequence = SequenceResult(np.array([1], np.int32), None, "length", routed_experts=experts)
    told = routed_of(sequence, "b64")
    assert told["dtype"] == dtype
    found = np.frombuffer(base64.b64decode(told["data"]), dtype).reshape(told["shape"])
    np.testing.assert_array_equal(found, experts)
    np.testing.assert_array_equal(np.frombuffer(base64.b85decode(routed_of(sequence)["data"]), "<i4"), [0, largest])


def test_large_answers_are_written_as_their_clients_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client that asks again and again for one sample and reads nothing would have the server hold a copy,
    or its numbers, for each; and after it has left, write one."""
    drawn = SequenceResult(np.zeros(2000, np.int32), np.zeros(2000, np.float32), "length")
    outcome = Outcome(encode_sample_response([drawn]))
    read, written, taken = list[bytes](), list[int](), list[Message]()

    async def ended(_asked: Any) -> list[Outcome]:
        return [outcome]

    real = streaming.result_of

    def result_of(outcome: Outcome, request_id: str) -> SampleResult:
        read.append(outcome.payload)
        return real(outcome, request_id)

    monkeypatch.setattr(waiting, "ended", ended)
    monkeypatch.setattr(streaming, "result_of", result_of)

    def write(number: int) -> Callable[[list[SampleResult]], dict[str, Any]]:
        def answer(results: list[SampleResult]) -> dict[str, Any]:
            written.append(number)
            return {"tokens": results[0].sequences[0].tokens.tolist()}

        return answer

    async def send(message: Message) -> None:
        taken.append(message)

    async def go() -> None:
        bodies = LargeBodies(100_000, wait_s=30, what="results")

        async def work(_size_bytes: int, work: Callable[[], bytes]) -> bytes:
            return await asyncio.to_thread(work)

        async def gone_from(*_: Any) -> None: ...

        service: Any = SimpleNamespace(polls=LongPolls(100), large_answers=bodies, work=work)
        service.afterwards, service.journal = Afterwards(), SimpleNamespace(outcome=gone_from)

        left = asyncio.Event()

        async def leaves() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def stays() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        def asked(org_id: str, receive: Callable[[], Awaitable[Message]] = stays) -> list[Asked]:
            who: Any = SimpleNamespace(org_id=org_id)
            request: Any = SimpleNamespace(receive=receive)
            about = (service, who, request, cast(Any, None), [1], SamplingParams(), "id", None, None)
            return [Asked(*about, keep=True)]

        first = await waiting.answer(asked("a"), write(1))
        gone = asyncio.ensure_future(waiting.answer(asked("a", leaves), write(0)))
        second = asyncio.ensure_future(waiting.answer(asked("a"), write(2)))
        await waiting.answer(asked("b"), write(3))
        assert (written, len(read)) == ([1, 3], 2)
        left.set()
        with pytest.raises(ClientDisconnect):
            await gone
        await first({"type": "http"}, cast(Any, None), send)
        await second
        assert written == [1, 3, 2]
        assert len(orjson.loads(b"".join(message.get("body", b"") for message in taken))["tokens"]) == 2000

    asyncio.run(go())
