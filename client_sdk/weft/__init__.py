"""Weft's client: `from weft import ServiceClient, types`.

A training loop written for Tinker runs after changing its import: clients, methods and types have the same names.
Names are loaded when first used, so that `import weft`, and the server's `import weft.wire`, cost nothing more.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import types as types
    from weft.errors import *  # noqa: F403
    from weft.future import APIFuture as APIFuture
    from weft.loss_handle import LossHandle as LossHandle
    from weft.plan.estimate import CostEstimate as CostEstimate
    from weft.plan.plan import (
        Plan as Plan,
        PlannedSample as PlannedSample,
        PlannedSave as PlannedSave,
        PlannedTrain as PlannedTrain,
        PlannedUpdate as PlannedUpdate,
    )
    from weft.rest_client import AdminClient as AdminClient, RestClient as RestClient
    from weft.sampling_client import SamplingClient as SamplingClient
    from weft.service_client import ServiceClient as ServiceClient
    from weft.training_client import TrainingClient as TrainingClient, log as log
    from weft.transport.retry import RetryPolicy as RetryPolicy
    from weft.types import *  # noqa: F403
    from weft.version import __version__ as __version__
    from weft.wire.checks.problem import Problem as Problem


def _refuse_a_stranger() -> None:
    """Raise `ImportError` if another package with the import name `weft` is installed in the same folder: its files and
    ours would be mixed up."""
    here = Path(__file__).parent
    for notes in here.parent.glob("weft[-_]*.dist-info"):
        files = notes / "RECORD"
        ours = notes.name.startswith(("weft_tuning-", "weft_tuning_server-"))
        if not ours and files.is_file() and "\nweft/__init__.py," in "\n" + files.read_text():
            name = notes.name.removesuffix(".dist-info").replace("-", " ")
            raise ImportError(
                f"{name} and weft-tuning both install the package `weft` into {here.parent}, over each other's files: "
                f"pip uninstall {name.split()[0]} weft-tuning, then install weft-tuning again"
            )


_refuse_a_stranger()

_HOMES = {
    "APIFuture": "weft.future",
    "AdminClient": "weft.rest_client",
    "CostEstimate": "weft.plan.estimate",
    "LossHandle": "weft.loss_handle",
    "Plan": "weft.plan.plan",
    "PlannedSample": "weft.plan.plan",
    "PlannedSave": "weft.plan.plan",
    "PlannedTrain": "weft.plan.plan",
    "PlannedUpdate": "weft.plan.plan",
    "Problem": "weft.wire.checks.problem",
    "RestClient": "weft.rest_client",
    "RetryPolicy": "weft.transport.retry",
    "SamplingClient": "weft.sampling_client",
    "ServiceClient": "weft.service_client",
    "TrainingClient": "weft.training_client",
    "__version__": "weft.version",
    "log": "weft.training_client",
}


def __getattr__(name: str) -> Any:
    if name == "types":
        return importlib.import_module("weft.types")
    if name.startswith("_") and name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    homes = [_HOMES[name]] if name in _HOMES else ["weft.errors", "weft.types"]
    for home in homes:
        module = importlib.import_module(home)
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
