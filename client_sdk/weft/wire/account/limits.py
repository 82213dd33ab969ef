"""Bodies of Weft's own answers to "what may I ask for, and what does it cost": limits, prices, balance."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.wire.account.usage import UsageKind
from weft.wire.base import Response

__all__ = ["BalanceResponse", "LimitsResponse", "LossLimits", "ModelLimits", "PricesResponse"]


class ModelLimits(Response):
    """Tokens are 0 to `vocab_size` - 1; a prompt with what follows it has at most `context_length` tokens."""

    vocab_size: int
    context_length: int
    #: The tokens that end a sample whose request says nothing about `stop`.
    eos_token_ids: list[int] | None = None
    #: The number of experts, and the last two sizes of `routed_experts` [T, mixture layers, choices]. 0: a model
    #: without experts.
    num_experts: int | None = None
    mixture_layers: int | None = None
    experts_per_token: int | None = None


class LossLimits(Response):
    """What a loss takes: inputs of every datum, and `config` keys, each with its default (None: not a number)."""

    required: list[str]
    optional: list[str] = Field(default_factory=list)
    config: dict[str, float | str | None] = Field(default_factory=dict)
    #: True if `target_tokens` may be [T, K].
    multi_target: bool = False
    #: True if data may have inputs other than the required and optional ones.
    other_inputs: bool = False
    #: Required inputs that a datum may lack where its provenance spans say what was recorded when it was sampled.
    recorded: list[str] = Field(default_factory=list)

    @property
    def accepted(self) -> frozenset[str]:
        """The names of all these inputs."""
        return frozenset((*self.required, *self.optional))


class LimitsResponse(Response):
    """What a server accepts. A limit that an older server does not name is not checked (None)."""

    models: dict[str, ModelLimits]
    losses: dict[str, LossLimits]
    optimizers: list[str] = Field(default_factory=lambda: ["adamw"])
    max_body_bytes: int | None = None
    #: Per forward / forward_backward request; the client cuts larger operations itself.
    max_data: int | None = None
    max_tokens_per_op: int | None = None
    max_rank: int | None = None
    max_num_samples: int | None = None
    max_stop_sequences: int | None = None
    max_stop_characters: int | None = None
    max_top_logprobs: int | None = None
    min_ttl_seconds: int | None = None
    max_ttl_seconds: int | None = None
    #: The sizes at which the client cuts operations. They decide how often an amount is rounded.
    chunk_data: int = Field(default=1024, ge=1)
    chunk_bytes: int = Field(default=5_000_000, ge=1)


class PricesResponse(Response):
    """The rates that hold now for one model, in micro-USD per million tokens."""

    base_model: str
    price_version: str
    rates_uusd_per_mtok: dict[UsageKind, int]
    storage_uusd_per_gb_month: int = 0


class BalanceResponse(Response):
    """What was spent, and what is left, in nano-USD. `available_nusd` is the balance plus the overdraft, less the holds
    of running operations. It and `balance_nusd` are None if nothing limits spending."""

    spent_nusd: int
    spent_this_month_nusd: int
    #: The month in UTC, as 2026-11.
    month: str
    balance_nusd: int | None = None
    mode: Literal["prepaid", "postpaid", "unlimited"] = "unlimited"
    held_nusd: int = 0
    overdraft_nusd: int = 0
    available_nusd: int | None = None
