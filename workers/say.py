"""How a worker says what it does: as the server has told it."""

from __future__ import annotations

from scheduler.links.configs import Basics
from store import logs, tracing


def say_as(basics: Basics) -> None:
    """Set up this process's log and traces."""
    role = basics.role or "worker"
    logs.configure(basics.log_format, basics.log_level, role)
    tracing.configure(f"weft-{role.partition('-')[0]}")
