"""Forks the holder of weights of a process that was itself forked: everything is imported already."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.forked import ForkedChild
from workers.leave import leave
from workers.model.base import holder


class ForkedHolder(ForkedChild):
    """Replaces `subprocess.Popen` for a holder."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **others: Any) -> None:
        super().__init__(lambda: leave(holder.main(command[-2:])), env, *sorted(pass_fds), stays=True)


def fork_holders(memory: str) -> None:
    """Have holders forked from now on; they keep a CPU's weights in `memory`."""
    holder.MEMORY["cpu"] = memory
    holder.subprocess = SimpleNamespace(Popen=ForkedHolder)  # type: ignore[assignment, attr-defined]
