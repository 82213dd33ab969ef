"""Failures of rollouts: the first of each kind is logged, all are counted in the curves; and rows of groups that came
to nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weft.errors import WeftError
from weft.rl.chat.chat import StaleError, is_fatal

logger = logging.getLogger("weft")


class RolloutsFailedError(WeftError):
    """Every rollout fails. The exception's cause is the error of the last rollout."""


class Failures:
    """Logs the first error of each kind. A sample that the loop made stale is no failure."""

    def __init__(self) -> None:
        self._seen: set[type[BaseException]] = set()

    def tell(self, error: BaseException, what: str = "a rollout") -> None:
        if type(error) in self._seen or isinstance(error, StaleError):
            return
        self._seen.add(type(error))
        logger.warning("%s failed: %s: %s (others like it are only counted)", what, type(error).__name__, error)


class InARow:
    """Counts groups in a row that came to nothing: all their rollouts failed, or a filter rejected them."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._failed = self._rejected = 0

    def failed(self, error: Exception, what: str = "a group") -> Exception | None:
        """Count a group without any good rollout. Returns the error that the loop should end with: a fatal one at once,
        another after so many failed groups in a row; else None."""
        self._failed += 1
        if is_fatal(error):  # the loop ends with this error, and reports it
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
        """Count a group rejected by a filter. Rejections have no limit, but they cost money, so they are logged now and
        then."""
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
