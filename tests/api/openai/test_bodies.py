"""Bodies of the wrong form: what their refusals say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.errors import ApiError, explain, field_of
from api.http.bodies import parse_json
from api.routes.openai.bodies import ChatBody, CompletionBody, GenerateBody, ResponsesBody

PROMPT = "must be a text, a list of tokens (whole numbers from 0), or a list of one of these"
STOP = "must be a text, or a list of texts with at most 4096 items"
INPUT = "must be a text, or a list of one or more items (objects)"


@pytest.mark.parametrize(
    ("body", "given", "says"),
    [
        (CompletionBody, {"prompt": None}, f"prompt: {PROMPT} (got None)"),
        (CompletionBody, {"prompt": [1, "b"]}, f"prompt: {PROMPT}"),
        (CompletionBody, {"prompt": [-1]}, f"prompt: {PROMPT}"),
        (CompletionBody, {"prompt": "a", "stop": 5}, f"stop: {STOP} (got 5)"),
        (CompletionBody, {"prompt": "a", "stop": ["a"] * 4097}, f"stop: {STOP}"),
        (ResponsesBody, {"input": []}, f"input: {INPUT}"),
        (ResponsesBody, {"input": 5}, f"input: {INPUT} (got 5)"),
    ],
)
def test_of_a_value_that_may_have_several_forms_one_line_says_which(
    body: type[BaseModel], given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"model": "m"} | given)
    assert (explain(caught.value), field_of(caught.value)) == (says, says.partition(":")[0])


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"stop_token_ids": ["a"]}, "sampling_params.stop_token_ids"),
        (5, "sampling_params"),
    ],
)
def test_a_field_of_an_object_is_named_with_the_object(params: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateBody.model_validate({"model": "m", "token_ids": [1], "sampling_params": params})
    assert field_of(caught.value) == field


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a"], [[1, 2]], [], [""]])
def test_openais_forms_of_a_prompt_are_taken_as_they_are(prompt: Any) -> None:
    assert CompletionBody.model_validate({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(("logprobs", "asked"), [(False, None), (None, None), (0, 0), (True, 1), (3, 3)])
def test_a_completion_that_wants_no_logprobs_gets_none(logprobs: Any, asked: int | None) -> None:
    """False, which a chat allows, does not mean the zero likeliest."""
    body = CompletionBody.model_validate({"model": "m", "prompt": "a", "logprobs": logprobs})
    assert body.logprobs == asked
    assert body.logprobs is not False


CHAT = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
NUMBERS = ["max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "seed", "top_logprobs"]
NUMBERS += ["prompt_logprobs", "max_staleness", "frequency_penalty", "min_p", "best_of"]


def _of_chat(field: str, value: str) -> ChatBody:
    body = parse_json(f'{json.dumps(CHAT)[:-1]}, "logprobs": true, "{field}": {value}}}'.encode(), ChatBody)
    body.refuse_unknown()
    return body


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_boolean_is_no_number(field: str, value: str) -> None:
    """True was one token, one choice, and a temperature of 1."""
    with pytest.raises(ApiError, match=f"^{field}: (must be a number, not true or false|.* cannot be honoured here)"):
        _of_chat(field, value)


@pytest.mark.parametrize("value", ["2.0", '"2"'])
@pytest.mark.parametrize("field", ["max_tokens", "n", "temperature", "top_k", "seed", "top_logprobs"])
def test_numbers_that_vllm_reads_are_read(field: str, value: str) -> None:
    assert getattr(_of_chat(field, value), field) == 2


@pytest.mark.parametrize("token", ["true", "2.0"])
def test_only_whole_numbers_are_tokens(token: str) -> None:
    with pytest.raises(ApiError, match=r"^stop_token_ids\.0: "):
        _of_chat("stop_token_ids", f"[{token}]")
    with pytest.raises(ApiError, match=r"^prompt: must be a text, a list of tokens"):
        parse_json(f'{{"model": "m", "prompt": [{token}]}}'.encode(), CompletionBody)
