"""Money as integers: rates in micro-USD per million tokens, amounts in nano-USD (billionths of a dollar)."""

from __future__ import annotations


def amount_nusd(tokens: int, uusd_per_mtok: int) -> int:
    """The price of `tokens`, rounded half up once: the same arithmetic as the server's billing."""
    return (tokens * uusd_per_mtok * 1000 + 500_000) // 1_000_000


def usd(amount_nusd: int) -> str:
    """Dollars, exactly: 1_234_500_000 is "1.234500000"."""
    whole, rest = divmod(abs(amount_nusd), 10**9)
    return f"{'-' if amount_nusd < 0 else ''}{whole}.{rest:09d}"


def dollars(amount_nusd: int) -> str:
    """The same in a sentence: -1_234_500_000 is "-$1.234500000"."""
    return f"{'-' if amount_nusd < 0 else ''}${usd(abs(amount_nusd))}"
