"""OpenAI's Responses API on a real server, as OpenAI's official client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import weft
from weft.types import AdamParams, Datum, ModelInput

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(weftd: Weftd) -> Iterator[openai.OpenAI]:
    key = weftd.key("responses")
    with openai.OpenAI(base_url=weftd.url + "/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def respond(client: openai.OpenAI, **more: Any) -> Any:
    given: Any = {"model": BASE_MODEL, "input": "What is 3 + 5?", "max_output_tokens": 24}
    extra = {"seed": 1, **IDS, **more.pop("extra_body", {})}
    return client.responses.create(**given | more, extra_body=extra)


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    given = {"model": BASE_MODEL, "messages": messages, "max_completion_tokens": 24, "seed": 1, "extra_body": IDS}
    return client.chat.completions.create(**given | more)


def test_a_response_is_what_a_chat_says(client: openai.OpenAI, weftd: Weftd) -> None:
    got = respond(client, instructions="Answer briefly.", include=["message.output_text.logprobs"], top_logprobs=2)
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is 3 + 5?"}]
    said = chat(client, messages, logprobs=True, top_logprobs=2)
    (choice,) = said.choices
    assert (got.prompt_token_ids, got.token_ids) == (said.prompt_token_ids, choice.token_ids)
    assert (got.output_text, got.status, got.model) == (choice.message.content, "completed", BASE_MODEL)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (said.usage.prompt_tokens, said.usage.completion_tokens)
    told = got.output[0].content[0].logprobs
    assert [entry.logprob for entry in told] == [entry.logprob for entry in choice.logprobs.content]
    assert [len(entry.top_logprobs) for entry in told] == [2] * len(told)
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("responses")) as service:
        rows = service.create_rest_client().get_usage().result().rows
    sampled = sum(row.tokens for row in rows if row.kind == "sample")
    assert sampled == got.usage.output_tokens + said.usage.completion_tokens


def test_what_is_cut_is_incomplete_and_stops_are_left_out(client: openai.OpenAI) -> None:
    cut = respond(client, max_output_tokens=1, temperature=3.0, extra_body={"seed": 5})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 1
    whole = respond(client, temperature=3.0, extra_body={"seed": 5}).output_text
    stopped = respond(client, temperature=3.0, extra_body={"seed": 5, "stop": whole[3:5]})
    assert stopped.output_text == whole[: whole.index(whole[3:5])]


def test_a_stream_says_the_same_in_order(client: openai.OpenAI) -> None:
    whole = respond(client, temperature=3.0)
    events = list(respond(client, temperature=3.0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    done = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-4:] == [*done, f"response.{whole.status}"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    with client.responses.stream(
        model=BASE_MODEL, input="What is 3 + 5?", max_output_tokens=24, temperature=3.0, extra_body={"seed": 1}
    ) as stream:
        seen = [event.type for event in stream]
    assert seen == kinds


def test_each_delta_has_its_logprobs(client: openai.OpenAI) -> None:
    told = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 3.0}
    events = list(respond(client, **told, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    row = [(each.token, each.logprob, len(each.top_logprobs)) for delta in deltas for each in delta.logprobs]
    assert row
    assert row == [(each.token, each.logprob, 2) for each in done.logprobs][: len(row)]
    assert "".join(each.token for each in deltas[0].logprobs).startswith(deltas[0].delta)


def test_functions_are_called_and_their_results_read(client: openai.OpenAI, weftd: Weftd) -> None:
    """A run that has learned one call makes it; its result stands in the next prompt as it would in a chat."""
    asked = respond(client, tools=[ADD], max_output_tokens=1)
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("responses")) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=16, seed=0).result()
        answer = run.get_tokenizer().encode(CALL + "<|im_end|>", add_special_tokens=False)
        ids = [*asked.prompt_token_ids, *answer]
        weights = [0.0] * (len(ids) - 1 - len(answer)) + [1.0] * len(answer)
        datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights})
        for _ in range(120):
            backward = run.forward_backward([datum], "cross_entropy")
            run.optim_step(AdamParams(learning_rate=5e-3)).result()
            if backward.result().metrics["loss:sum"] < 0.2:
                break
        run.save_weights_for_sampler("calls").result()
        taught = {"model": f"run:{run.get_info().model_id}", "tools": [ADD], "max_output_tokens": 40, "temperature": 0}
        got = respond(client, **taught)
        assert [item.type for item in got.output] == ["function_call"], got.output_text
        (call,) = got.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 3})
        assert got.output_text == ""
        events = list(respond(client, **taught, stream=True))
        assert [event.type for event in events][2:] == [
            *("response.output_item.added", "response.function_call_arguments.delta"),
            *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
        ]
        assert events[-1].response.output[0].arguments == call.arguments
        assert respond(client, **taught, tool_choice="none").prompt_token_ids != got.prompt_token_ids
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What is 3 + 5?"}]}, call.model_dump(), output]
    again = respond(client, input=items, tools=[ADD], max_output_tokens=1)
    kept = {"type": "function", "function": {"name": "add", "parameters": ADD["parameters"]}}
    function = {"name": "add", "arguments": call.arguments}
    messages = [
        {"role": "user", "content": "What is 3 + 5?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": "8"},
    ]
    assert again.prompt_token_ids == chat(client, messages, tools=[kept], max_completion_tokens=1).prompt_token_ids


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: no response is kept here"),
        ({"conversation": "conv_1"}, "conversation: no response is kept here"),
        ({"store": True}, "store: True cannot be honoured"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"text": {"format": {"type": "json_object"}}},
            "text.format: type 'json_object' cannot be honoured here; nothing",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity: is not supported here"),
        ({"top_logprobs": 2}, "top_logprobs: only with include"),
        ({"tools": [ADD, ADD]}, "tools[1].name: 'add' is the name of an earlier tool"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: type 'web_search'; only functions"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]: only text"),
        ({"extra_body": {"max_tokens": 4}}, "max_tokens: is not supported"),
    ],
)
def test_refusals_name_the_parameter(client: openai.OpenAI, given: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **given)
    assert says in str(caught.value)


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    more = {
        "store": False,
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "user": "me",
        "reasoning": {"summary": "auto", "effort": None},
        "previous_response_id": None,
    }
    assert respond(client, **more, text={"format": {"type": "text"}}).output_text == respond(client).output_text
