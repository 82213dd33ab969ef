"""Requests that end without a result: what is wrong with them, and the message for their sender.

Users see only messages written here: text of other exceptions may name files.
"""

from __future__ import annotations

import logging
import math

from store.blobs.contract import is_lasting
from workers.generator.adapters import AdapterUnusable
from workers.generator.engine import Facts, Finished, GenerateRequest, RequestError
from workers.generator.tokens.stop import NoTokenizer
from workers.model.memory import is_out_of_memory

log = logging.getLogger(__name__)

NOTHING = Facts()


class NotFinite(ArithmeticError):
    """A sequence's logits are NaN or infinite."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__("the logits are not finite" + ("; are this sampler's weights?" if adapted else ""))
        self.adapted = adapted


def failed(request_id: str, error: BaseException, computed: Facts = NOTHING) -> Finished:
    """The end of a request for which `error` was raised after this many tokens were `computed`."""
    if isinstance(error, AdapterUnusable | NoTokenizer):
        return refused(request_id, str(error))
    log.warning("request %s failed: %s", request_id, error, exc_info=error)
    if isinstance(error, NotFinite) and error.adapted:
        return Finished(request_id, error=RequestError(str(error), "user", ran=True), facts=computed)
    if isinstance(error, NotFinite):
        return Finished(request_id, error=RequestError(str(error), "server"))
    message = f"generation failed ({type(error).__name__}); the generator's log has the details"
    if is_out_of_memory(error):  # worth trying again with more memory, but not for ever
        return Finished(request_id, error=RequestError(message, "server", "again"))
    return Finished(request_id, error=RequestError(message, "server", "" if is_lasting(error) else "later"))


def refused(request_id: str, message: str) -> Finished:
    """The answer to a request that cannot be served as it is."""
    return Finished(request_id, error=RequestError(message, "user"))


def request_fault(request: GenerateRequest, context: int, vocab_size: int) -> str | None:
    """A sentence that says what is wrong with a request; None if nothing is. A prompt may fill the context: the last
    token sampled is not fed back."""
    sampling = request.sampling
    if not request.prompt:
        return "the prompt is empty: it needs at least one token"
    if len(request.prompt) > context:
        return f"the prompt has {len(request.prompt)} tokens; the context of this model is {context}"
    if not all(0 <= token < vocab_size for token in request.prompt):
        return f"the prompt has a token outside the vocabulary of {vocab_size}"
    if request.num_samples < 1:
        return f"num_samples is {request.num_samples}; it must be at least 1"
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 0"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; it must be a number from 0 up"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if sampling.top_k < -1:
        return f"top_k is {sampling.top_k}; it must be -1 or 0 (off), or at least 1"
    return None
