"""Bodies of the wrong form: what their refusals say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.errors import explain, field_of
from api.routes.openai.bodies import CompletionBody, GenerateBody, ResponsesBody

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
