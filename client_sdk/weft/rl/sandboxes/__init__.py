"""Sandboxes, in which code that a model wrote is run: `Local` on this machine, `Modal` and `Prime` at those
providers."""

from weft.rl.sandboxes.local import Local
from weft.rl.sandboxes.modal import Modal
from weft.rl.sandboxes.prime import Prime
from weft.rl.sandboxes.sandbox import (
    CannotIsolateError,
    Done,
    Limits,
    Quota,
    Sandbox,
    SandboxError,
    Sandboxes,
    Snapshot,
    opened,
    require,
)

__all__ = [
    "CannotIsolateError",
    "Done",
    "Limits",
    "Local",
    "Modal",
    "Prime",
    "Quota",
    "Sandbox",
    "SandboxError",
    "Sandboxes",
    "Snapshot",
    "opened",
    "require",
]
