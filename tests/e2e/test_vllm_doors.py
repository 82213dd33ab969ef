"""The routes that vLLM's clients use, and what the server keeps of a client's own session, by plain HTTP."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import weft
import weft.rl as rl
from weft.types import ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def http(weftd: Weftd) -> Iterator[httpx.Client]:
    key = {"Authorization": f"Bearer {weftd.key('vllm')}"}
    with httpx.Client(base_url=weftd.url, headers=key, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def sampler(weftd: Weftd) -> Iterator[weft.SamplingClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("vllm")) as service:
        yield service.create_sampling_client(base_model=BASE_MODEL).result()


def post(http: httpx.Client, path: str, body: Any, session: str | None = None, status: int = 200) -> Any:
    reply = http.post(path, json=body, headers={"X-Session-ID": session} if session else {})
    assert reply.status_code == status, reply.text
    return reply.json()


def generate(http: httpx.Client, tokens: list[int], session: str | None = None, **params: Any) -> Any:
    asked = {"max_tokens": 6, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": False, "seed": 4} | params
    return post(
        http, "/inference/v1/generate", {"model": BASE_MODEL, "token_ids": tokens, "sampling_params": asked}, session
    )


def test_generate(http: httpx.Client, sampler: weft.SamplingClient) -> None:
    direct = sampler.sample(
        ModelInput.from_ints(PROMPT), 2, SamplingParams(max_tokens=6, seed=4), include_prompt_logprobs=True
    ).result()
    answer = generate(http, PROMPT, n=2, prompt_logprobs=1, routed_experts_prompt_start=3)
    assert answer["prompt_token_ids"] == PROMPT
    for choice, sequence in zip(answer["choices"], direct.sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in sequence.tokens]
        assert [entry["logprob"] for entry in entries] == pytest.approx(sequence.logprobs, abs=1e-6)
        assert choice["finish_reason"] == sequence.stop_reason
    assert answer["prompt_logprobs"][0] is None
    found = [row[str(token)]["logprob"] for row, token in zip(answer["prompt_logprobs"][1:], PROMPT[1:], strict=True)]
    assert found == pytest.approx(direct.prompt_logprobs[1:], abs=1e-6)  # type: ignore[index]


ENDLESS = {"ignore_eos": True, "temperature": 2.0, "seed": 3}


def test_no_end_stops_what_is_to_ignore_it_as_load_tools_ask(http: httpx.Client) -> None:
    """guidellm and vLLM's own benchmark want exactly that many tokens from each request."""
    chat = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "3 + 5 ="}], "max_tokens": 600} | ENDLESS
    text = {"model": BASE_MODEL, "prompt": "3 + 5 =", "max_tokens": 1900} | ENDLESS
    for path, body in (("chat/completions", chat), ("completions", text)):
        ended, endless = (post(http, f"/v1/{path}", body | more) for more in ({"ignore_eos": False}, {}))
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert endless["choices"][0]["finish_reason"] == "length"
        assert endless["usage"]["completion_tokens"] == body["max_tokens"]
    assert len(generate(http, PROMPT, **ENDLESS, max_tokens=1900)["choices"][0]["token_ids"]) == 1900
    stop = generate(http, PROMPT, max_tokens=2)["choices"][0]["token_ids"][1]
    assert generate(http, PROMPT, ignore_eos=True, stop_token_ids=[stop])["choices"][0]["token_ids"][-1] == stop
    refusal = post(http, "/v1/completions", text | {"stop": ["x"]}, status=400)["error"]
    assert refusal["message"] == "stop, ignore_eos: only one of them can be honoured"


def test_every_chunk_tells_the_usage_so_far_where_asked_to(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": BASE_MODEL, "prompt": PROMPT, "max_tokens": 12, "stream": True, "stream_options": options}
    lines = http.post("/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    drawn = 0
    for chunk in chunks:
        drawn += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        told = [chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        assert told == [len(PROMPT), drawn, len(PROMPT) + drawn]
    assert drawn == 12


def test_its_health_is_where_vllms_clients_look_for_it(weftd: Weftd) -> None:
    assert httpx.get(weftd.url + "/health").status_code == 200


def test_generate_nothing_scores_the_prompt(http: httpx.Client) -> None:
    answer = generate(http, PROMPT, max_tokens=0, prompt_logprobs=1)
    assert answer["choices"][0]["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    scored = zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True)
    assert all(math.isfinite(row[str(token)]["logprob"]) for token, row in scored)


def test_the_likeliest_tokens_beside_each(http: httpx.Client, sampler: weft.SamplingClient) -> None:
    params = SamplingParams(max_tokens=6, seed=4)
    direct = sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=3).result().sequences[0]
    entries = generate(http, PROMPT, logprobs=3)["choices"][0]["logprobs"]["content"]
    assert direct.topk_logprobs is not None
    for entry, row in zip(entries, direct.topk_logprobs, strict=True):
        assert row is not None
        assert [cell["token"] for cell in entry["top_logprobs"]] == [f"token_id:{token}" for token, _ in row]
        assert [cell["logprob"] for cell in entry["top_logprobs"]] == pytest.approx([each for _, each in row], abs=1e-6)


@pytest.mark.parametrize("door", ["/inference/v1/generate", "/v1/completions", "/v1/chat/completions/tokens"])
def test_the_likeliest_tokens_of_a_prompt(http: httpx.Client, sampler: weft.SamplingClient, door: str) -> None:
    """In vLLM's form: at each place the prompt's own token and the wanted number of likeliest ones."""
    direct = sampler.sample(
        ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()  # fmt: skip
    asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 3}
    body = {
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": asked},
        "/v1/completions": {"prompt": PROMPT, **asked},
        "/v1/chat/completions/tokens": {"tokens": PROMPT, **asked},
    }[door]
    answer = post(http, door, {"model": BASE_MODEL, **body})
    assert direct.topk_prompt_logprobs is not None
    assert direct.prompt_logprobs is not None
    assert answer["prompt_logprobs"][0] is None
    told = zip(PROMPT, direct.prompt_logprobs, direct.topk_prompt_logprobs, answer["prompt_logprobs"], strict=True)
    for token, logprob, row, found in list(told)[1:]:
        expected = {str(token): logprob, **{str(other): each for other, each in row or []}}
        assert {name: cell["logprob"] for name, cell in found.items()} == pytest.approx(expected, abs=1e-6)


def test_so_many_likeliest_tokens_of_a_prompt_are_refused_by_name(http: httpx.Client) -> None:
    body = {"model": BASE_MODEL, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 101}
    assert post(http, "/v1/completions", body, status=400)["error"]["param"] == "prompt_logprobs"


#: The defaults of vLLM's own `SamplingParams`, and further fields that clients send.
DEFAULTS: dict[str, Any] = {
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0},
    **{"min_p": 0.0, "stop": [], "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0, "prompt_logprobs": None},
    **{"flat_logprobs": False, "detokenize": True, "spaces_between_special_tokens": True, "skip_clone": False},
    **{"include_stop_str_in_output": False, "output_kind": 0, "output_text_buffer_length": 0, "bad_words": []},
    **{"_all_stop_token_ids": [], "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None},
    **{"extra_args": None, "thinking_token_budget": None, "return_token_ids": True, "cache_salt": "x"},
}


def test_what_changes_nothing_is_taken(http: httpx.Client) -> None:
    more = {"cache_salt": "x", "priority": 1, "request_id": "r", "stream": False, "features": None}
    asked = {"max_tokens": 6, "seed": 4, **DEFAULTS}
    body = {"model": BASE_MODEL, "token_ids": PROMPT, "sampling_params": asked, **more}
    found = post(http, "/inference/v1/generate", body)["choices"][0]["token_ids"]
    assert found == generate(http, PROMPT)["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"guided_decoding": {"regex": "a"}},
        {"thinking_token_budget": 3},
        {"truncate_prompt_tokens": 1},
        {"extra_args": {"x": 1}},
        {"repetition_detection": {"max_pattern_size": 2}},
        {"min_p": 0.1},
        {"nobody_knows": 1},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_would_change_the_tokens_is_refused_by_name(http: httpx.Client, asked: dict[str, Any]) -> None:
    body = {"model": BASE_MODEL, "token_ids": PROMPT, "sampling_params": {"max_tokens": 2, **asked}}
    refusal = post(http, "/inference/v1/generate", body, status=400)["error"]
    assert refusal["param"] == f"sampling_params.{next(iter(asked))}"
    assert refusal["message"].startswith(refusal["param"] + ": ")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT, "stream": True}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"mm_hashes": {}}}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "content_parts": [{"type": "image_url"}]}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "kv_transfer_params": {"do_remote_decode": True}}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}),
        ("/detokenize", {"tokens": PROMPT, "skip_special_tokens": 2}),
    ],
)
def test_what_a_door_does_not_do_is_refused_by_name(http: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    refusal = post(http, path, {"model": BASE_MODEL, **asked}, status=400)["error"]
    assert refusal["param"] == list(asked)[-1]


def test_a_token_that_is_none_is_named(http: httpx.Client) -> None:
    refusal = post(http, "/detokenize", {"model": BASE_MODEL, "tokens": [1, 10**6]}, status=400)["error"]
    assert refusal["message"] == "tokens: token 1000000 at position 1; this model's tokens are 0 to 1559"


def test_routed_experts(http: httpx.Client, sampler: weft.SamplingClient) -> None:
    direct = sampler.sample(
        ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=6, seed=4), return_routed_experts=True
    ).result()
    body = {"model": BASE_MODEL, "token_ids": PROMPT, "return_routed_experts": True}
    answer = post(http, "/inference/v1/generate", body | {"sampling_params": {"max_tokens": 6, "seed": 4}})
    routed = answer["choices"][0]["routed_experts"]
    found = np.frombuffer(base64.b64decode(routed["data"]), dtype=routed["dtype"]).reshape(routed["shape"])
    np.testing.assert_array_equal(found, direct.sequences[0].routed_experts_np)


def test_a_chat_over_tokens_is_the_chat_over_its_messages(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    asked = {"model": BASE_MODEL, "max_completion_tokens": 8, "seed": 1, "logprobs": True, "return_token_ids": True}
    chat = post(http, "/v1/chat/completions", asked | {"messages": messages})
    tokens = post(http, "/tokenize", {"model": BASE_MODEL, "messages": messages})
    assert tokens["tokens"] == chat["prompt_token_ids"]
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 2048)
    same = post(http, "/v1/chat/completions/tokens", asked | {"messages": messages, "tokens": tokens["tokens"]})
    assert same["choices"] == chat["choices"]
    text = post(http, "/detokenize", {"model": BASE_MODEL, "tokens": tokens["tokens"]})["prompt"]
    assert text.endswith("What is 1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert post(http, "/tokenize", {"model": BASE_MODEL, "prompt": text})["tokens"] == tokens["tokens"]
    post(http, "/detokenize", {"model": BASE_MODEL, "tokens": [10**6]}, status=400)


def test_what_was_sampled_in_a_session_can_be_read(weftd: Weftd, http: httpx.Client) -> None:
    first = generate(http, PROMPT, "a/b", n=2)
    longer = PROMPT + first["choices"][1]["token_ids"] + [70, 71]
    second = generate(http, longer, "a/b")
    generate(http, PROMPT, "another")
    found = http.get("/api/v1/weft/turns/a/b").json()
    drawn = [choice["token_ids"] for answer in (first, second) for choice in answer["choices"]]
    assert [turn["tokens"] for turn in found["turns"]] == drawn
    assert [turn["prompt"] for turn in found["turns"]] == [PROMPT, PROMPT, longer]
    assert [turn["choice"] for turn in found["turns"]] == [0, 1, 0]
    for turn in found["turns"]:
        assert len(turn["logprobs"]) == sum(count for _, count in turn["versions"]) == len(turn["tokens"])
        assert turn["model"] == BASE_MODEL
    page = http.get("/api/v1/weft/turns/a/b", params={"limit": 1}).json()
    assert [turn["tokens"] for turn in page["turns"]] == drawn[:2]
    rest = http.get("/api/v1/weft/turns/a/b", params={"limit": 1, "after": page["next"]}).json()
    assert [turn["tokens"] for turn in rest["turns"]] == drawn[2:]
    stranger = {"X-API-Key": weftd.key("strangers"), "Authorization": ""}
    assert http.get("/api/v1/weft/turns/a/b", headers=stranger).status_code == 404


def test_five_turns_with_a_break_are_two_data(weftd: Weftd, http: httpx.Client) -> None:
    """An agent keeps its history for three turns, then rewrites it and goes on."""
    history, texts = list(PROMPT), []
    for turn in range(5):
        if turn == 3:
            history = [90, 91, 92]
        drawn = generate(http, history, "five", temperature=0.7 if turn == 4 else 1.0)["choices"][0]
        texts.append((list(history), drawn["token_ids"], [e["logprob"] for e in drawn["logprobs"]["content"]]))
        history += [*drawn["token_ids"], 80 + turn]
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("vllm")) as service:
        rollout = rl.trajectories("five", service)
        with pytest.raises(weft.NotFoundError):
            rl.trajectories("never", service)
    assert [(list(turn.prompt), list(turn.tokens)) for turn in rollout.turns] == [text[:2] for text in texts]
    data = rl.data_of(rollout, advantage=1.0)
    assert len(data) == 2
    assert "sampling_temperature" not in data[0].loss_fn_inputs
    told = data[1].loss_fn_inputs["sampling_temperature"].to_numpy()
    assert (told == np.float32(0.7)).sum() == len(texts[4][1])
    named = {span.sequence_id: span.length for span in data[0].loss_fn_input_spans if type(span).__name__[0] == "S"}
    assert named == {turn.sequence_id: len(turn.tokens) for turn in rollout.turns[:3]}
    for datum, last, members in zip(data, (texts[2], texts[4]), (texts[:3], texts[3:]), strict=True):
        whole = last[0] + last[1]
        assert datum.model_input.to_ints() == whole[:-1]
        mask = np.asarray(datum.loss_fn_inputs["mask"].values)
        logprobs = np.asarray(datum.loss_fn_inputs["logprobs"].values)
        assert mask.sum() == sum(len(tokens) for _, tokens, _ in members)
        for prompt, tokens, drawn in members:
            place = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
            assert mask[place].all()
            np.testing.assert_allclose(logprobs[place], drawn, atol=1e-6)
