"""A process that was forked forks its holder of weights too: all is imported already."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.forked import ForkedChild
from workers.leave import leave
from workers.model.base import holder


class ForkedHolder(ForkedChild):
    """For the holder's `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **others: Any) -> None:
        super().__init__(lambda: leave(holder.main(command[-2:])), env, *sorted(pass_fds), stays=True)


def fork_holders(memory: str) -> None:
    """Of a CPU's weights, in `memory`."""
    holder.MEMORY["cpu"] = memory
    holder.subprocess = SimpleNamespace(Popen=ForkedHolder)  # type: ignore[assignment, attr-defined]
