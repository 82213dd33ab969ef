"""A budget that is never passed: the most that a request can cost is put aside before it is sent.

Amounts are what docs/billing.md of the server says, rounded once for each kind of each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import WeftError
from weft.money import amount_nusd, dollars


class BudgetSpent(WeftError):
    """The next request could pass the budget."""


@dataclass
class Purse:
    """The money of one loop, in nano-dollars. With `limit_nusd` None it only counts."""

    rates: Mapping[str, int]
    limit_nusd: int | None = None
    spent_nusd: int = 0
    held_nusd: int = 0
    #: The part of `spent_nusd` that is billed to no run of the loop: the scores of a teacher or a reference.
    elsewhere_nusd: int = 0

    def price(self, **tokens: int) -> int:
        """The price of one request with these numbers of tokens, by kind."""
        return sum(amount_nusd(count, self.rates.get(kind, 0)) for kind, count in tokens.items())

    def hold(self, amount: int) -> int:
        """Hold the most that a request can cost, or raise `BudgetSpent`."""
        if self.limit_nusd is not None and self.spent_nusd + self.held_nusd + amount > self.limit_nusd:
            raise BudgetSpent(
                f"the budget of {dollars(self.limit_nusd)} could be passed: {dollars(self.spent_nusd)} are spent,"
                f" {dollars(self.held_nusd)} held for what is under way, and this would cost up to {dollars(amount)}"
            )
        self.held_nusd += amount
        return amount

    def pay(self, amount: int, *, elsewhere: bool = False) -> None:
        """Spend the known cost of a request before it is sent, or raise `BudgetSpent`."""
        self.settle(self.hold(amount), amount)
        self.elsewhere_nusd += amount * elsewhere

    def settle(self, held: int, cost: int) -> None:
        """Replace a hold by the request's actual cost; if that is unknown, by the whole hold."""
        self.held_nusd -= held
        self.spent_nusd += cost
