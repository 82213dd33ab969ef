"""What this server accepts, as data, so that a client can check a planned loop before it spends anything.

The same constants that the checks in `api.checks` and `workers.trainer.loss_inputs` refuse by.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.wire import LimitsResponse, LossLimits, ModelLimits

from api.checks.optimizers import CONFIGS
from api.checks.runs import MAX_TTL_S, MIN_TTL_S
from api.checks.samples import MAX_STOP_CHARACTERS, MAX_TOP_LOGPROBS
from store.settings import Limits
from workers.model.card import ModelCard
from workers.trainer.loss_inputs import LOSSES, LossSpec

#: Inputs that the sampler has recorded for whoever asked, by loss.
RECORDED = {"stable_reinforce": ["logprobs"]}

#: A loss that its user has uploaded, and that says by itself what it reads.
CUSTOM = LossLimits(required=["target_tokens"], config={"loss_id": None}, multi_target=True, other_inputs=True)


def limits_of(cards: Mapping[str, ModelCard], limits: Limits, chunk_data: int, chunk_bytes: int) -> LimitsResponse:
    """Everything a client may want to check by. `chunk_*` are the sizes at which clients cut operations."""
    return LimitsResponse(
        models={name: _model(card, limits) for name, card in cards.items()},
        losses={**{name: _loss(name, spec) for name, spec in LOSSES.items()}, "custom": CUSTOM},
        optimizers=list(CONFIGS),
        max_body_bytes=limits.max_body_bytes,
        max_data=limits.max_data,
        max_tokens_per_op=limits.max_tokens_per_op,
        max_rank=limits.max_rank,
        max_num_samples=limits.max_num_samples,
        max_stop_sequences=limits.max_stop_sequences,
        max_stop_characters=MAX_STOP_CHARACTERS,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        min_ttl_seconds=MIN_TTL_S,
        max_ttl_seconds=MAX_TTL_S,
        chunk_data=chunk_data,
        chunk_bytes=chunk_bytes,
    )


def _model(card: ModelCard, limits: Limits) -> ModelLimits:
    config = card.config
    return ModelLimits(
        vocab_size=card.vocab_size,
        context_length=min(card.context_length, limits.max_seq_len),
        num_experts=config.num_experts,
        mixture_layers=len(config.mixture_layers),
        experts_per_token=config.experts_per_token,
    )


def _loss(name: str, spec: LossSpec) -> LossLimits:
    return LossLimits(
        required=list(spec.required),
        optional=sorted(spec.accepted - set(spec.required)),
        config=dict(spec.settings),
        multi_target=spec.multi_target,
        recorded=RECORDED.get(name, []),
    )
