"""Makes the calls of a tour and records their outcomes."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

CLASSES: dict[str, type] = {
    "ServiceClient": tinker.ServiceClient,
    "TrainingClient": tinker.TrainingClient,
    "SamplingClient": tinker.SamplingClient,
    "RestClient": RestClient,
}


class Tour:
    """Makes calls one after the other. A failed call does not stop the rest, except those that need its result."""

    def __init__(self) -> None:
        #: Outcomes by the call's name: `Class.method` or `Class.method: variant`.
        self.results: dict[str, dict[str, Any]] = {}

    def call(self, name: str, make: Callable[[], Any], takes: Sequence[str] = ()) -> Any:
        """The value of `make()`, or None. `takes`: parameters that a version needs to have the call at all."""
        method = name.partition(":")[0]
        if not self._there(method, takes):
            self.results[name] = {"result": "absent"}
            return None
        start = time.perf_counter()
        try:
            value = make()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            self.results[name] = {"result": "fail", "reason": reason, "trace": traceback.format_exc()[-3000:]}
            return None
        self.results[name] = {"result": "ok", "seconds": round(time.perf_counter() - start, 2)}
        return value

    def record(self, name: str, result: str, reason: str = "") -> None:
        self.results[name] = {"result": result, **({"reason": reason} if reason else {})}

    @staticmethod
    def _there(method: str, takes: Sequence[str]) -> bool:
        owner, _, attribute = method.partition(".")
        if owner not in CLASSES:
            return True
        found = getattr(CLASSES[owner], attribute, None)
        return found is not None and set(takes) <= set(inspect.signature(found).parameters)


def refusal(make: Callable[[], Any]) -> str:
    """The error with which the server refuses the call. The call fails if it is not refused."""
    try:
        make()
    except Exception as error:
        return str(error)
    raise AssertionError("it was accepted")


def done(future: Any, timeout_s: float = 60) -> Any:
    """The result of a future (older versions return some results at once). A call that hangs is a failed one."""
    return future.result(timeout_s) if hasattr(future, "result") else future
