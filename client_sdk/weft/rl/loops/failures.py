"""Why rollouts failed: the first of each kind is told, the rest is counted in the curves. And groups that come to
nothing, one after another."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weft.errors import WeftError
from weft.rl.chat.chat import StaleError, is_fatal

logger = logging.getLogger("weft")


class RolloutsFailedError(WeftError):
    """Every rollout fails: the cause is the last one's error."""


class Failures:
    """Warns of each kind of error once. What the loop ends by itself is none."""

    def __init__(self) -> None:
        self._seen: set[type[BaseException]] = set()

    def tell(self, error: BaseException, what: str = "a rollout") -> None:
        if type(error) in self._seen or isinstance(error, StaleError):
            return
        self._seen.add(type(error))
        logger.warning("%s failed: %s: %s (others like it are only counted)", what, type(error).__name__, error)


class InARow:
    """Groups that came to nothing since one did better: without a rollout, or rejected by a filter."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._failed = self._rejected = 0

    def failed(self, error: Exception, what: str = "a group") -> Exception | None:
        """A group without a rollout. The next may do better; when none does, the loop must not go on silently: what it
        ends with."""
        self._failed += 1
        if is_fatal(error):  # the loop ends with that, and tells it
            return error
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
        if self._failed < max(4, self._batch):
            return None
        ended = RolloutsFailedError(f"{self._failed} groups in a row failed; the last: {type(error).__name__}: {error}")
        ended.__cause__ = error
        return ended

    def rolled(self) -> None:
        self._failed = 0

    def rejected(self, why: str, rewards: Sequence[float]) -> None:
        """A group that no batch gets. Rejecting goes on as long as it takes, and costs: so it is told."""
        self._rejected += 1
        if self._rejected % (4 * self._batch) == 0:
            logger.warning(
                "%d groups in a row were rejected by %r; the last had rewards from %g to %g. They are paid for:"
                " look at the reward function, the filter, and how hard the tasks are",
                self._rejected,
                why,
                min(rewards),
                max(rewards),
            )

    def kept(self) -> None:
        self._rejected = 0
