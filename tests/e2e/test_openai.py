"""The OpenAI-compatible API of a real server, as OpenAI's official client and curl see it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import weft
from weft import types
from weft.types import ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server

MESSAGES: Any = [{"role": "user", "content": "What is 3 + 5?"}]
IDS, SPELLED = {"return_token_ids": True}, {"skip_special_tokens": False}


@pytest.fixture(scope="module")
def client(weftd: Weftd) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=weftd.url + "/v1", api_key=weftd.key("openai"), max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def service(weftd: Weftd) -> Iterator[weft.ServiceClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("openai")) as service:
        yield service


@pytest.fixture(scope="module")
def http(weftd: Weftd) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=weftd.url, headers={"X-API-Key": weftd.key("openai")}, timeout=60) as http:
        yield http


def used(service: weft.ServiceClient) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in service.create_rest_client().get_usage().result().rows:
        found[row.kind] = found.get(row.kind, 0) + row.tokens
    return found


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": BASE_MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1} | more
    return client.chat.completions.create(**given)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (BASE_MODEL, 2048)  # type: ignore[attr-defined]
    assert client.models.retrieve(BASE_MODEL).id == BASE_MODEL


def test_a_chat_is_the_sample_of_its_template(client: openai.OpenAI, service: weft.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    tokenizer = sampler.get_tokenizer()
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    direct = sampler.sample(ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=8, seed=1)).result()
    reply = chat(client, n=2, logprobs=True, top_logprobs=3, extra_body=IDS)
    assert reply.prompt_token_ids == prompt
    for choice, sequence in zip(reply.choices, direct.sequences, strict=True):
        assert choice.token_ids == sequence.tokens
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(sequence.logprobs, abs=1e-6)
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(sequence.tokens)
        assert choice.message.content == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert choice.finish_reason == sequence.stop_reason
        assert choice.weft["policy_versions"] == [[0, len(sequence.tokens)]]
    drawn = sum(len(sequence.tokens) for sequence in direct.sequences)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), drawn)


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, n=2, max_completion_tokens=40, logprobs=True, extra_body=IDS)
    texts, tokens, logprobs, reasons, usage = ["", ""], [[], []], [[], []], [None, None], None
    stale: list[Any] = [None, None]
    stream = chat(
        client,
        **{"n": 2, "max_completion_tokens": 40, "logprobs": True, "extra_body": IDS, "stream": True},
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            stale[choice.index] = getattr(choice, "weft", {}).get("stale", stale[choice.index])
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert [len(row) for row in logprobs] == [len(row) for row in tokens]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert stale == [choice.weft["stale"] for choice in whole.choices] == [False, False]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_with_usage_every_chunk_says_that_it_has_none_but_the_last(http: httpx.Client) -> None:
    body = {"model": BASE_MODEL, "prompt": "3 + 5 =", "max_tokens": 4, "stream": True}
    reply = http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [bool(chunk["usage"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []


def test_a_streamed_completion_begins_with_the_ids_of_its_prompt(http: httpx.Client) -> None:
    body = {"model": BASE_MODEL, "prompt": [5, 6, 7], "n": 2, "max_tokens": 2, "stream": True} | IDS
    lines = http.post("/v1/completions", json=body).text.splitlines()
    told = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [choice.get("prompt_token_ids") for choice in told[:2]] == [[5, 6, 7]] * 2
    assert [choice["index"] for choice in told[:2]] == [0, 1]


def test_the_stream_ends_as_curl_expects(http: httpx.Client) -> None:
    body = {"model": BASE_MODEL, "prompt": "3 + 5 =", "max_tokens": 4, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = "".join(reply.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("text" in json.loads(event[6:])["choices"][0] for event in events[:-2])


def test_completions_and_stop_strings(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=BASE_MODEL, prompt="3 + 5 =", max_tokens=30, seed=2, logprobs=2)
    (choice,) = plain.choices
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == plain.usage.completion_tokens  # type: ignore[union-attr]
    stop = choice.text[3:5]
    ends: Any = {"model": BASE_MODEL, "prompt": "3 + 5 =", "max_tokens": 30, "seed": 2, "stop": [stop]}
    stopped = client.completions.create(**ends).choices[0]
    assert (stopped.text, stopped.finish_reason) == (choice.text[: choice.text.index(stop)], "stop")
    streamed = client.completions.create(**ends, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == stopped.text


@pytest.mark.parametrize("form", ["text", "array of texts", "tokens", "array of tokens"])
def test_a_prompt_in_any_of_openais_forms_is_the_same(client: openai.OpenAI, http: httpx.Client, form: str) -> None:
    text = "3 + 5 ="
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    forms = {"text": text, "array of texts": [text], "tokens": tokens, "array of tokens": [tokens]}
    given: dict[str, Any] = {"model": BASE_MODEL, "max_tokens": 8, "temperature": 0}
    plain, found = (client.completions.create(prompt=each, **given) for each in (text, forms[form]))
    assert found.choices[0].text == plain.choices[0].text


@pytest.mark.parametrize("prompt", ["3 + 5 = <|im_end|>na\u00efve", "3 + 5 =", [21, 13, 5]])
def test_an_echo_tells_the_prompt_as_lm_eval_reads_it(
    http: httpx.Client, service: weft.ServiceClient, prompt: Any
) -> None:
    """lm-eval adds up the prompt's log-probabilities, without that of the drawn token; it calls a continuation greedy
    if the answer lists no likelier token at any of its places."""
    body = {"model": BASE_MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 2}
    plain, answer = (http.post("/v1/completions", json=body | more).json() for more in ({}, {"echo": True} | IDS))
    (choice,), tokens = answer["choices"], answer["prompt_token_ids"]
    told = choice["logprobs"]
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    logprobs = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:-1] == pytest.approx(logprobs[1:], abs=1e-6)
    for own, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert own <= max(top.values())
    drawn = plain["choices"][0]
    text = prompt if isinstance(prompt, str) else http.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    assert choice["text"] == text + drawn["text"]
    assert told["text_offset"][-1] == len(text)
    begin = [*told["text_offset"], len(choice["text"])]
    words = {
        choice["text"][start:end]: word for start, end, word in zip(begin, begin[1:], told["tokens"], strict=False)
    }
    assert all(said == word for said, word in words.items() if word != "\ufffd" and said)
    assert {name: row[-1:] for name, row in told.items() if name != "text_offset"} == {
        name: row for name, row in drawn["logprobs"].items() if name != "text_offset"
    }
    assert "prompt_logprobs" not in answer
    nothing = http.post("/v1/completions", json=body | {"echo": True, "max_tokens": 0, "logprobs": None}).json()
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["logprobs"]) == (text, None)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"echo": True, "n": 2}, "echo"),
        ({"echo": True, "prompt_logprobs": 1}, "echo"),
        ({"logprobs": 101}, "logprobs"),
    ],
)
def test_a_refusal_of_a_completion_names_the_parameter(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/completions", json={"model": BASE_MODEL, "prompt": "3"} | more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


SEVERAL = ["3 + 5 =", "12", "na\u00efve 7 - 2 ="]


@pytest.mark.parametrize("form", ["texts", "tokens"])
def test_several_prompts_are_answered_as_each_by_itself(http: httpx.Client, form: str) -> None:
    """lm-evaluation-harness sends a batch of prompts in one request."""
    prompts = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] if form == "tokens" else text
               for text in SEVERAL]  # fmt: skip
    body: dict[str, Any] = {"model": BASE_MODEL, "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True} | IDS
    alone = [http.post("/v1/completions", json=body | {"prompt": prompt}).json() for prompt in prompts]
    found = http.post("/v1/completions", json=body | {"prompt": prompts}).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for one, choice in zip(alone, found["choices"], strict=True):
        assert choice == one["choices"][0] | {"index": choice["index"], "prompt_token_ids": one["prompt_token_ids"]}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)
    del body["echo"]
    body |= {"prompt_logprobs": 1}
    rows = [http.post("/v1/completions", json=body | {"prompt": prompt}).json() for prompt in prompts]
    told = http.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in told] == [row["prompt_logprobs"] for row in rows]


def test_streams_of_several_prompts_have_their_indices(client: openai.OpenAI, service: weft.ServiceClient) -> None:
    asked: dict[str, Any] = {"model": BASE_MODEL, "prompt": SEVERAL, "n": 2, "max_tokens": 30, "seed": 4, "logprobs": 0}
    whole = client.completions.create(**asked)
    before = used(service).get("sample", 0)
    texts, words, usage = [""] * 6, [list[str]() for _ in range(6)], None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            words[choice.index] += (choice.logprobs.tokens if choice.logprobs else None) or []
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 3
    assert words == [choice.logprobs.tokens for choice in whole.choices]  # type: ignore[union-attr]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == used(service)["sample"] - before


def test_what_exceeds_the_context_is_refused_by_each_doors_parameter_name(http: httpx.Client) -> None:
    long, draws = [1] * 2049, {"model": BASE_MODEL, "max_tokens": 1}
    said = [{"role": "user", "content": "3 " * 2048}]
    asked = {
        "/v1/completions": draws | {"prompt": long},
        "/v1/chat/completions": draws | {"messages": said},
        "/v1/chat/completions/tokens": draws | {"messages": said, "tokens": long},
        "/v1/responses": {"model": BASE_MODEL, "input": "3 " * 2048},
        "/inference/v1/generate": {"model": BASE_MODEL, "token_ids": long, "sampling_params": {"max_tokens": 1}},
    }
    errors = [http.post(door, json=body).json()["error"] for door, body in asked.items()]
    assert {error["code"] for error in errors} == {"context_length_exceeded"}
    assert [error["param"] for error in errors] == ["prompt", "messages", "tokens", "input", "token_ids"]


def test_a_prompt_that_fills_the_context_draws_one_token_as_a_sample_does(http: httpx.Client) -> None:
    """The last token takes no place: it is not read."""
    body = {"model": BASE_MODEL, "prompt": [1] * 2048, "max_tokens": 5, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "length")


def test_bad_token_ids_and_stops_are_refused_by_each_doors_parameter_name(http: httpx.Client) -> None:
    draws, wrong = {"model": BASE_MODEL, "max_tokens": 1}, [1, 10**6]
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("prompt", "/v1/completions", {"prompt": wrong}),
        ("tokens", "/v1/chat/completions/tokens", {"messages": [], "tokens": wrong}),
        ("token_ids", "/inference/v1/generate", {"token_ids": wrong}),
        ("stop_token_ids", "/v1/completions", {"prompt": "3", "stop_token_ids": wrong}),
        ("stop_token_ids", "/v1/completions", {"prompt": "3", "stop_token_ids": list(range(100))}),
        ("stop", "/v1/completions", {"prompt": "3", "stop": [str(one) for one in range(100)]}),
    ]
    for name, door, body in asked:
        ours = draws if door != "/inference/v1/generate" else {"model": BASE_MODEL}
        error = http.post(door, json=ours | body).json()["error"]
        assert (error["param"], error["message"].split(":")[0]) == (name, name)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": ["3"] * 129}, "prompt: 129 prompts, the limit is 128: send fewer in each request"),
        ({"prompt": ["3"] * 128, "n": 9}, "prompts x n: 1152 choices in one answer, the limit is 1024"),
        ({"prompt": [[1], [1] * 2049]}, "prompt[1]: This model's maximum context length is 2048 tokens"),
        ({"prompt": [[1], [10**6]]}, "prompt[1]: prompt: token"),
        ({"prompt": [[1], []]}, "prompt[1]: prompt: "),
        ({"prompt": ["3", "4"], "n": 2} | IDS, "return_token_ids: of several prompts only with n: 1"),
        ({"prompt": ["3", "4"], "n": 2, "prompt_logprobs": 0}, "prompt_logprobs: of several prompts only with n: 1"),
        ({"prompt": [[1]] * 128, "max_tokens": 2000, "logprobs": 5}, "1,536,000 log-probabilities in one answer"),
    ],
)
def test_what_is_wrong_with_one_of_several_prompts_refuses_all_by_name(
    http: httpx.Client, service: weft.ServiceClient, given: dict[str, Any], says: str
) -> None:
    before = used(service)
    reply = http.post("/v1/completions", json={"model": BASE_MODEL} | given)
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text
    assert used(service) == before


def test_several_prompts_are_one_request_to_a_retry_and_to_a_session(
    http: httpx.Client, service: weft.ServiceClient
) -> None:
    headers = {"Idempotency-Key": "several", "X-Session-ID": "several"}
    body = {"model": BASE_MODEL, "prompt": SEVERAL, "max_tokens": 5, "temperature": 3.0} | IDS
    before = used(service).get("sample", 0)
    first, second = (http.post("/v1/completions", json=body, headers=headers).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert used(service)["sample"] - before == first["usage"]["completion_tokens"]
    turns = http.get("/api/v1/weft/turns/several").json()["turns"]
    drawn = [(turn["prompt"], turn["tokens"]) for turn in turns]
    assert sorted(drawn) == sorted((choice["prompt_token_ids"], choice["token_ids"]) for choice in first["choices"])
    other = http.post("/v1/completions", json=body | {"prompt": [*SEVERAL[:2], "else"]}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert other.json()["error"]["message"].startswith("prompt[2]: Idempotency-Key: another request")


def test_a_completion_spells_special_tokens_where_asked_to(http: httpx.Client) -> None:
    body = {"model": BASE_MODEL, "prompt": "3 + 5 =", "max_tokens": 1900, "temperature": 2.0, "seed": 3} | IDS
    plain, spelled = (http.post("/v1/completions", json=body | more).json()["choices"][0] for more in ({}, SPELLED))
    assert plain["finish_reason"] == spelled["finish_reason"] == "stop"
    assert spelled["token_ids"] == plain["token_ids"]
    assert spelled["text"] == http.post("/detokenize", json={"tokens": spelled["token_ids"]}).json()["prompt"]
    assert spelled["text"] != plain["text"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"frequency_penalty": 1.0}, openai.BadRequestError, "frequency_penalty"),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "response_format: type 'json_object' cannot be honoured here; nothing constrains what a model draws;",
        ),
        ({"response_format": {"json": True}}, openai.BadRequestError, "such an object cannot be honoured here"),
        ({"response_format": ["json"]}, openai.BadRequestError, "such a list cannot be honoured here"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"beam_width": 4}}, openai.BadRequestError, "beam_width"),
        ({"tool_choice": "required"}, openai.BadRequestError, 'send "auto", and expect answers without a call'),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        (
            {"messages": [{"role": "user", "content": "3 + 5 " * 2000}]},
            openai.BadRequestError,
            "maximum context length",
        ),
        ({"stop": ["a"] * 5000}, openai.BadRequestError, "at most 4096 items"),
        (
            {"messages": [{"role": "usr", "content": "x"}]},
            openai.BadRequestError,
            "messages[0].role: 'usr' is not known",
        ),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools[0].function: must be an object"),
        ({"max_tokens": 3}, openai.BadRequestError, "max_tokens, max_completion_tokens: they differ"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options: only with stream: true"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs: only with logprobs: true"),
        (
            {"stream": True, "extra_body": {"prompt_logprobs": 1}},
            openai.BadRequestError,
            "prompt_logprobs: only without stream: true",
        ),
        (
            {"stream": True, "extra_body": {"prompt_logprobs": 0}},
            openai.BadRequestError,
            "prompt_logprobs: only without stream: true",
        ),
        (
            {"stream": True, "extra_body": {"return_routed_experts": True}},
            openai.BadRequestError,
            "return_routed_experts: only without stream: true",
        ),
        ({"extra_body": {"chat_template_kwargs": 1}}, openai.BadRequestError, "chat_template_kwargs: "),
        ({"extra_body": {"add_generation_prompt": False}}, openai.BadRequestError, "add_generation_prompt"),
        ({"model": "nope"}, openai.NotFoundError, "nope"),
        ({"model": "run:nobody:train:0"}, openai.NotFoundError, "nobody"),
        ({"model": "tinker://nobody:train:0/sampler_weights/x"}, openai.NotFoundError, "nobody"),
        ({"n": 100_000}, openai.BadRequestError, "n: must be 1 to 1024, got 100000"),
        (
            {"n": 200, "max_completion_tokens": 1500, "logprobs": True, "top_logprobs": 20},
            openai.BadRequestError,
            "6,300,000 log-probabilities in one answer, the limit is 1,048,576",
        ),
    ],
)
def test_refusals(client: openai.OpenAI, given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        chat(client, **given)
    assert says in caught.value.body["message"]  # type: ignore[attr-defined]
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"stop_token_ids": ["x"]}}, "stop_token_ids"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
        ({"n": 100_000}, "n"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
        ({"stop": [""]}, "stop[0]"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
    ],
)
def test_a_refusal_names_the_parameter(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **given)
    assert caught.value.param == param


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    same = chat(client, frequency_penalty=0, response_format={"type": "text"}, user="me", logit_bias={})
    assert same.choices[0].message.content == chat(client).choices[0].message.content


def test_keys(weftd: Weftd) -> None:
    bad = openai.OpenAI(base_url=weftd.url + "/v1", api_key="tml-nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        chat(bad)


def test_a_client_that_leaves_stops_its_sample_and_pays_for_it(
    weftd: Weftd, http: httpx.Client, service: weft.ServiceClient
) -> None:
    """Once a stream's reader has left, fewer tokens are drawn than in one second while they read."""
    body = {"model": BASE_MODEL, "prompt": [50, 60], "max_tokens": 1900, "stop_token_ids": [1], "n": 4}
    body["return_token_ids"] = True
    for stream in (False, True, True, True):  # a busy machine may draw slower while the stream is read than afterwards
        before = used(service).get("sample", 0)
        seen: list[tuple[float, int]] = []

        def leave(stream: bool = stream, seen: list[tuple[float, int]] = seen) -> None:
            with httpx.Client(base_url=weftd.url, headers=dict(http.headers)) as leaving:
                try:
                    if stream:
                        with leaving.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                            for line in reply.iter_lines():
                                if line.startswith("data: {"):
                                    choices = json.loads(line[6:])["choices"]
                                    drawn = sum(len(choice.get("token_ids") or ()) for choice in choices)
                                    seen.append((time.monotonic(), drawn))
                                if sum(count for _, count in seen) > 400:
                                    return
                    else:
                        leaving.post("/v1/completions", json=body, timeout=0.6)
                except httpx.ReadTimeout:
                    return

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        left = time.monotonic()
        while used(service).get("sample", 0) == before:
            assert time.monotonic() - left < 30
            time.sleep(0.05)
        drawn = used(service).get("sample", 0) - before
        assert 0 < drawn < 4 * 1900
        if stream:
            read, took_s = sum(count for _, count in seen), seen[-1][0] - seen[0][0]
            if drawn - read < read / took_s:
                return
    pytest.fail(f"{drawn - read} tokens were drawn after he had left, and {read} in {took_s:.2f} s before")


def test_a_retry_is_computed_and_billed_once(client: openai.OpenAI, service: weft.ServiceClient) -> None:
    before = used(service)
    once = {"extra_headers": {"Idempotency-Key": "the same"}, "seed": None, "temperature": 3.0}
    first, second = chat(client, **once), chat(client, **once)
    assert first.id == second.id
    assert first.choices[0].message.content == second.choices[0].message.content
    after = used(service)
    assert after["sample"] - before.get("sample", 0) == first.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key: another request was sent with this key") as told:
        chat(client, **once, max_completion_tokens=3)
    assert told.value.code == "idempotency_key_reused"
    assert used(service) == after


def test_a_run_and_its_newest_weights(client: openai.OpenAI, service: weft.ServiceClient) -> None:
    run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    run_id = run.get_info().model_id
    with pytest.raises(openai.NotFoundError, match="save_weights_for_sampler"):
        chat(client, model=f"run:{run_id}")
    datum = types.Datum(
        model_input=ModelInput.from_ints(list(range(30, 50))),
        loss_fn_inputs={"target_tokens": list(range(31, 51)), "weights": [1.0] * 20},
    )
    for steps, name in enumerate(("one", "two", None), 1):
        run.forward_backward([datum], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        if name is not None:
            path = run.save_weights_for_sampler(name).result().path
        else:
            run.save_weights_and_get_sampling_client(kind="inflight").result()
        reply = chat(client, model=f"run:{run_id}", extra_body=IDS)
        assert [version for version, _ in reply.choices[0].weft["policy_versions"]] == [steps]
        if name is not None:
            assert chat(client, model=path).choices[0].message.content == reply.choices[0].message.content
    again = {"extra_headers": {"Idempotency-Key": "over a save"}, "model": f"run:{run_id}"}
    first = chat(client, **again)
    run.save_weights_for_sampler("three").result()
    assert chat(client, **again).id == first.id


def test_two_hundred_at_once(weftd: Weftd) -> None:
    import asyncio

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=weftd.url + "/v1", api_key=weftd.key("openai"), timeout=300) as client:
            asked = [chat(client, max_completion_tokens=4) for _ in range(200)]  # type: ignore[arg-type]
            replies = await asyncio.gather(*asked)
        assert len({reply.choices[0].message.content for reply in replies}) == 1

    asyncio.run(go())
