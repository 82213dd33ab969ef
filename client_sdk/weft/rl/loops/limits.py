"""What a base model allows, and what may be sampled for training."""

from __future__ import annotations

from weft.rl import checks
from weft.rl.rollout import off_policy
from weft.run_weights import base_model_of
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.wire.account.limits import ModelLimits
from weft.wire.sampling import SamplingParams


async def model_limits(run: TrainingClient) -> ModelLimits:
    """The limits of the run's base model."""
    limits = await run.create_rest_client().get_limits()
    return limits.models[base_model_of(await run.get_info_async())]


async def sampler_limits(sampler: SamplingClient) -> ModelLimits:
    """The limits of the sampler's base model, which may differ from the run's."""
    limits = await sampler.create_rest_client().get_limits()
    return limits.models[await sampler.get_base_model_async()]


def on_policy(params: SamplingParams) -> SamplingParams:
    """Returns `params`. Raises ValueError if tokens drawn with them cannot be trained on."""
    wrong = off_policy(params.temperature, params.top_p, params.top_k)
    if wrong:
        raise ValueError(f"rollouts to train on are drawn from all tokens, at a temperature above 0; got {wrong}")
    if params.max_tokens is not None:
        checks.count("sampling.max_tokens", params.max_tokens)
    return params
