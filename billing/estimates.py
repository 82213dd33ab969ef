"""The most that an operation can cost: what is held for it when it is accepted. What it then costs is never more.

Both are taken from the price list at the time of acceptance. An operation is billed in one row for each kind, each
rounded on its own, which is why a bound for several kinds leaves room for their roundings.
"""

from __future__ import annotations

from datetime import datetime

from billing.prices import Kind, PriceList

#: An exact price in nano-USD has this as its denominator: tokens * uusd_per_mtok * 1000 / 1_000_000.
_EXACT = 1000


def most_for_tokens(prices: PriceList, model: str, kind: Kind, tokens: int, at: datetime) -> int:
    """Of an operation on data, whose tokens are known: exactly what it costs."""
    return prices.rate(model, kind, at).amount_nusd(tokens)


def most_for_sample(prices: PriceList, model: str, prompt: int, samples: int, new_tokens: int, at: datetime) -> int:
    """Of `samples` sequences from one prompt of `prompt` tokens, with at most `new_tokens` new ones altogether.

    The prompt is computed once at most (what of it is cached is another row, at its own rate) and read from the cache
    for the other samples."""
    prefill, cached, sample = (prices.rate(model, kind, at).uusd for kind in ("prefill", "cached_prefill", "sample"))
    exact = max(prefill, cached) * prompt + cached * (samples - 1) * prompt + sample * new_tokens
    return (exact + 3 * _EXACT // 2) // _EXACT if exact else 0
