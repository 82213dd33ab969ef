"""What is wrong with a planned `sample`: prompts, parameters, and whether both fit the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weft.plan.data import length_and_ids
from weft.plan.plan import AnyPrompt, PlannedSample
from weft.plan.problem import Problem, build
from weft.wire.arrays import Array
from weft.wire.error import WireError
from weft.wire.inputs import ModelInput
from weft.wire.limits import LimitsResponse, ModelLimits
from weft.wire.sampling import SamplingParams


def sample_problems(
    step: PlannedSample, model: ModelLimits | None, limits: LimitsResponse, where: str
) -> Iterator[Problem]:
    """All problems of one step."""
    params = step.sampling_params
    built = (
        (yield from build(SamplingParams, params, f"{where}.sampling_params"))
        if isinstance(params, Mapping)
        else params
    )
    if built is not None:
        yield from _params(built, model, limits, f"{where}.sampling_params")
    most = limits.max_num_samples
    if step.num_samples < 1 or (most is not None and step.num_samples > most):
        yield Problem(f"{where}.num_samples", "out of range", f"1 to {most}", step.num_samples)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        value = getattr(step, name)
        if value < 0 or (limits.max_top_logprobs is not None and value > limits.max_top_logprobs):
            yield Problem(f"{where}.{name}", "out of range", f"0 to {limits.max_top_logprobs}", value)
    if not step.prompts:
        yield Problem(f"{where}.prompts", "no prompts")
    for index, prompt in enumerate(step.prompts):
        yield from _prompt(prompt, built, model, f"{where}.prompts[{index}]")


def _prompt(
    prompt: AnyPrompt, params: SamplingParams | None, model: ModelLimits | None, where: str
) -> Iterator[Problem]:
    try:
        ids = prompt.to_ints() if isinstance(prompt, ModelInput) else list(prompt)
        tokens: Array = np.asarray(ids, dtype=np.int64)
    except (WireError, ValueError, TypeError, OverflowError) as error:
        yield Problem(where, f"not token ids: {error}")
        return
    yield from length_and_ids(tokens, model, where)
    if model is None or params is None or params.max_tokens is None or tokens.size > model.context_length:
        return
    room = model.context_length - tokens.size + 1  # the last token that is drawn needs no place
    if params.max_tokens > room:
        what = f"max_tokens do not fit behind {tokens.size} tokens of prompt; sequences would end early"
        yield Problem(where, what, room, params.max_tokens)


def _params(params: SamplingParams, model: ModelLimits | None, limits: LimitsResponse, where: str) -> Iterator[Problem]:
    if params.top_k == 0:
        yield Problem(f"{where}.top_k", "nothing to choose from", "-1 (all) or at least 1", 0)
    stops: Sequence[str | int] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if limits.max_stop_sequences is not None and len(stops) > limits.max_stop_sequences:
        yield Problem(f"{where}.stop", "too many stop sequences", limits.max_stop_sequences, len(stops))
    for index, stop in enumerate(stops):
        at = f"{where}.stop[{index}]"
        if isinstance(stop, str):
            if not stop or (limits.max_stop_characters is not None and len(stop) > limits.max_stop_characters):
                yield Problem(at, "length in characters", f"1 to {limits.max_stop_characters}", len(stop))
        elif model is not None and stop >= model.vocab_size:
            yield Problem(at, "out of the vocabulary", f"0 to {model.vocab_size - 1}", stop)
