"""When to send a request again, and after how long: a pure policy, no I/O.

408, 429, 5xx, broken connections and timeouts pass by themselves, so they are retried with growing pauses until a
budget is spent. 402 passes when somebody pays, so it is asked again, patiently. Everything else is final.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

#: The longest time that one attempt counts as. A longer one means that the process stood still, as on a laptop that
#: slept.
ATTEMPT_S = 60.0


def _jitter() -> float:
    """Not `random.random` itself: pickled, it takes its state along, and all processes that a client is handed to would
    pause alike."""
    return random.random()


@dataclass(frozen=True)
class RetryPolicy:
    """Pauses double from `first_pause_s` to `longest_pause_s`, shortened at random by up to a quarter so that many
    clients do not return together. No attempt starts later than `budget_s` after the first, where one that took longer
    than ATTEMPT_S counts as that."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    budget_s: float = 300.0
    billing_pause_s: float = 5.0
    billing_budget_s: float = 3600.0
    #: How long a result may be unreachable before its future gives up; operations survive restarts of the server.
    outage_budget_s: float = 3600.0
    jitter: Callable[[], float] = field(default=_jitter, repr=False)

    def pause_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """How long to wait after failed attempt number `attempt` (0, 1, ...). A server's wish up to a minute wins."""
        if retry_after_s is not None and 0 < retry_after_s <= 60:
            return retry_after_s
        longest = min(self.first_pause_s * 2.0 ** min(attempt, 30), self.longest_pause_s)
        return longest * (1 - 0.25 * self.jitter())


def passes_by_itself(status: int) -> bool:
    """True if a failure with this status is temporary, so that the same request is worth sending again."""
    return status in (408, 429) or status >= 500


def is_billing(status: int) -> bool:
    """True if the request was refused for lack of money."""
    return status == 402


class Attempts:
    """The decisions about one request: after each failure, how long to pause before the next attempt.

    `status` is that of the answer, None if there was none. With `patient`, 429 is waited out without end. That, and a
    pause for billing, restarts the budget for everything else.
    """

    def __init__(self, policy: RetryPolicy, now_s: float, patient: bool = False) -> None:
        self._policy = policy
        self._patient = patient
        self._seen_s = now_s  # from when on the next attempt counts
        self._spent_s = 0.0
        self._paused_s: float | None = None
        self._count = 0

    def pause_after(self, status: int | None, now_s: float, retry_after_s: float | None = None) -> float | None:
        """Seconds to wait, or None: the failure is final."""
        if status is not None and is_billing(status):
            return self._pause_for_billing(now_s)
        self._paused_s = None
        if status is not None and not passes_by_itself(status):
            return None
        pause_s = self._policy.pause_s(self._count, retry_after_s)
        self._spent_s += min(now_s - self._seen_s, ATTEMPT_S)
        if self._patient and status == 429:
            self._spent_s = 0.0  # a server that holds us back is reachable
        elif self._spent_s + pause_s > self._policy.budget_s:
            return None
        else:
            self._spent_s += pause_s
        self._count += 1
        self._seen_s = now_s + pause_s
        return pause_s

    def _pause_for_billing(self, now_s: float) -> float | None:
        self._paused_s = now_s if self._paused_s is None else self._paused_s
        if now_s + self._policy.billing_pause_s - self._paused_s > self._policy.billing_budget_s:
            return None
        self._seen_s, self._spent_s, self._count = now_s + self._policy.billing_pause_s, 0.0, 0
        return self._policy.billing_pause_s
