"""What this server accepts, as data: requests are checked against it, and clients are told it (for `validate`)."""

from __future__ import annotations

from collections.abc import Mapping

from weft.wire import LimitsResponse, ModelLimits
from weft.wire.checks.losses import WITH_CUSTOM

from api.checks.optimizers import CONFIGS
from api.checks.runs import MAX_TTL_S, MIN_TTL_S
from store.settings import Limits
from workers.model.card import ModelCard

#: The sizes at which clients cut an operation, unless this server takes less. The larger the parts, the better they
#: share passes.
CHUNK_DATA = 1024
CHUNK_BYTES = 5_000_000

MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 100


def limits_of(cards: Mapping[str, ModelCard], limits: Limits) -> LimitsResponse:
    """All limits that requests are checked against."""
    return LimitsResponse(
        models={name: _model(card, limits) for name, card in cards.items()},
        losses=WITH_CUSTOM,
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
        chunk_data=min(CHUNK_DATA, limits.max_data),
        chunk_bytes=min(CHUNK_BYTES, limits.max_body_bytes // 2),
    )


def _model(card: ModelCard, limits: Limits) -> ModelLimits:
    config = card.config
    return ModelLimits(
        vocab_size=card.vocab_size,
        context_length=min(card.context_length, limits.max_seq_len),
        eos_token_ids=list(card.eos_token_ids),
        num_experts=config.num_experts,
        mixture_layers=len(config.mixture_layers),
        experts_per_token=config.experts_per_token,
    )
