"""Why rollouts failed: the first of each kind is told, the rest is counted in the curves."""

from __future__ import annotations

import logging

from weft.rl.chat.chat import StaleError

logger = logging.getLogger("weft")


class Failures:
    """Warns of each kind of error once. What the loop ends by itself is none."""

    def __init__(self) -> None:
        self._seen: set[type[BaseException]] = set()

    def tell(self, error: BaseException, what: str = "a rollout") -> None:
        if type(error) in self._seen or isinstance(error, StaleError):
            return
        self._seen.add(type(error))
        logger.warning("%s failed: %s: %s (others like it are only counted)", what, type(error).__name__, error)
