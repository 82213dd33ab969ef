"""The check of a sample request before it is accepted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from weft.wire import EncodedTextChunk, LimitsResponse, SampleRequest
from weft.wire.checks.samples import sample_problems, text_problems

from api.errors import refuse


def check_sample(request: SampleRequest, limits: LimitsResponse, model: str, *, of_run: bool = True) -> int:
    """Check a request for the base model `model`. Returns the most tokens that one of its sequences can get: generation
    ends at the context length, where the last sampled token takes no position. `of_run`: the sampler uses weights of
    the client's own run. Raises Invalid naming the field, limit and value."""
    prompt = prompt_tokens(request)
    known = limits.models[model]
    refuse(sample_problems(request, prompt, limits, known, model, of_run=of_run))
    room = known.context_length - int(prompt.size) + 1
    most = request.sampling_params.max_tokens
    return room if most is None else min(most, room)


def prompt_tokens(request: SampleRequest) -> npt.NDArray[np.int64]:
    """All token ids of the prompt, int64 [T]. Raises Invalid for anything that is not text."""
    refuse(text_problems(request.prompt))
    chunks = [chunk for chunk in request.prompt.chunks if isinstance(chunk, EncodedTextChunk)]
    return np.concatenate([np.zeros(0, np.int64), *(np.array(chunk.tokens, dtype=np.int64) for chunk in chunks)])
