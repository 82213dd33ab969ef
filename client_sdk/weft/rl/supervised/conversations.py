"""Conversations as supervised data, by the base model's own chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from weft.rl import checks
from weft.rl.chat.render import TemplateRenderer, Tool
from weft.wire.inputs import Datum, ModelInput


def conversations(
    rows: Iterable[Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    *,
    tools: Sequence[Tool] | None = None,
    max_length: int | None = None,
) -> list[Datum]:
    """Lists of messages as data for `sft`: every answer is trained, to the token that ends its turn, and nothing else.

    A conversation whose template rewrites what was said before (thinking that is dropped from the history) becomes
    several data, so that each answer is trained behind the prompt that it will be sampled from. Where that begins a
    thought, it is the `reasoning_content` of the message, or what its content has before `</think>`, or empty. `tools`
    are the JSON schemas that the template shows, and answers may be calls of them. What is longer than `max_length`
    tokens is cut at the end.
    """
    if max_length is not None:
        checks.count("max_length", max_length, least=2)
    renderer = TemplateRenderer(tokenizer)
    made = []
    for number, messages in enumerate(rows):
        listed = isinstance(messages, Iterable) and not isinstance(messages, Mapping | str)
        if not listed or not all(isinstance(each, Mapping) for each in messages):
            raise ValueError(
                f"rows[{number}] must be a list of messages, each with 'role' and 'content', got {messages!r:.80};"
                " of a JSONL with a field of messages pass [row['messages'] for row in rows]"
            )
        with in_row(number):
            examples = renderer.example(messages, tools)
        for ids, sampled in examples:
            if any(sampled[1:max_length]):
                made.append(supervised(ids[:max_length], sampled[:max_length]))
    return made


@contextmanager
def in_row(number: int) -> Iterator[None]:
    """Raise errors in the block with the number of the row: it may be one of a hundred thousand."""
    try:
        yield
    except Exception as error:  # chat templates raise errors of their own, and jinja any other
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"rows[{number}]: {what}") from error


def supervised(ids: Sequence[int], trained: Sequence[bool]) -> Datum:
    """A datum for cross entropy: weight 1 on the trained tokens, 0 elsewhere."""
    weights = np.asarray(trained[1:], np.float32)
    inputs = {"target_tokens": list(ids[1:]), "weights": weights}
    return Datum(ModelInput.from_ints(list(ids[:-1])), inputs)


def scaled(datum: Datum, by: float) -> Datum:
    """The datum with all weights multiplied by `by`."""
    weights: Any = datum.loss_fn_inputs["weights"].to_numpy()
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": weights * np.float32(by)})
