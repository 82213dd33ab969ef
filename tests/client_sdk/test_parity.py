"""Every public method of the official SDK exists here, with the same arguments first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import tinker
import weft
from tinker.lib.public_interfaces.admin_client import AdminClient
from tinker.lib.public_interfaces.api_future import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient

#: Tinker's own console, telemetry and internals.
NOT_OURS = {"get_console_url", "get_telemetry", "holder", "create", "on_queue_state_change"}
#: Arguments that only our clients take, after Tinker's and optional.
OF_SAMPLE = ("max_staleness", "priority", "return_routed_experts", "stream")
NAMED = (
    "create_lora_training_client",
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
)
MORE = {
    *(("SamplingClient", "sample", name) for name in OF_SAMPLE),
    *(("ServiceClient", method, "name") for method in NAMED),
    *((client, "get_audit_log", "offset") for client in ("RestClient", "AdminClient")),
}
CLIENTS = {
    "ServiceClient": tinker.ServiceClient,
    "TrainingClient": tinker.TrainingClient,
    "SamplingClient": tinker.SamplingClient,
    "RestClient": RestClient,
    "AdminClient": AdminClient,
    "APIFuture": APIFuture,
}


def methods() -> Iterator[tuple[str, str]]:
    for client, theirs in CLIENTS.items():
        for name in dir(theirs):
            if not name.startswith("_") and name not in NOT_OURS:
                yield client, name


@pytest.mark.parametrize(("client", "name"), list(methods()))
def test_same_name_same_arguments(client: str, name: str) -> None:
    ours, theirs = getattr(weft, client), getattr(CLIENTS[client], name)
    if callable(theirs) and not name.endswith("_async"):
        mine = inspect.signature(getattr(ours, name)).parameters
        wanted = list(inspect.signature(theirs).parameters)
        assert list(mine)[: len(wanted)] == wanted
        more = list(mine.values())[len(wanted) :]
        assert {(client, name, argument.name) for argument in more} <= MORE
        assert all(argument.default is not argument.empty for argument in more)
    else:
        assert hasattr(ours, name)
