"""The server's log-probabilities of a few tokens with a checkpoint, for comparison with other programs
(`verify.py`)."""

from __future__ import annotations

from typing import Any

from weft.run_weights import base_model_of
from weft.sampling_client import SamplingClient
from weft.service_client import ServiceClient
from weft.wire.inputs import Datum, ModelInput
from weft.wire.rest import parse_checkpoint_path

#: Ordinary text (prose, a sum, code), so that any adapter changes the log-probabilities of some of it.
TEXT = (
    "The weft crosses the warp, over and under, and the cloth grows a thread at a time.\n"
    "Q: What is 17 + 25? A: 42\n"
    "def mean(values):\n    return sum(values) / len(values)\n"
)
MOST_TOKENS = 96


def fetch_reference(service: ServiceClient, path: str) -> dict[str, Any]:
    """Log-probabilities of some tokens with the checkpoint at `path`, and with its base model alone.

    Costs the prefill of at most twice `MOST_TOKENS` tokens. A checkpoint that cannot be sampled is loaded into a new
    run.
    """
    if parse_checkpoint_path(path).kind == "sampler_weights":
        sampler = service.create_sampling_client(model_path=path).result()
        base_model = sampler.get_base_model()
        tokens = sampler.get_tokenizer().encode(TEXT)[:MOST_TOKENS]
        logprobs = _of_prompt(sampler, tokens)
    else:
        run = service.create_training_client_from_state(path).result()
        base_model = base_model_of(run.get_info())
        tokens = run.get_tokenizer().encode(TEXT)[:MOST_TOKENS]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = Datum(ModelInput.from_ints(tokens[:-1]), inputs)
        output = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
        logprobs = [float(x) for x in output["logprobs"].to_numpy()]
    base = _of_prompt(service.create_sampling_client(base_model=base_model).result(), tokens)
    return {"path": path, "base_model": base_model, "tokens": tokens, "logprobs": logprobs, "base_logprobs": base}


def _of_prompt(sampler: SamplingClient, tokens: list[int]) -> list[float]:
    logprobs = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    return [x for x in logprobs if x is not None]
