"""What clients that need no session share: a transport, and futures at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from weft.future import APIFuture
from weft.transport.endpoint import resolve_endpoint
from weft.transport.http import Call, Transport, encode
from weft.transport.retry import RetryPolicy
from weft.wire.base import Request
from weft.wire.rest import parse_checkpoint_path

M = TypeVar("M", bound=BaseModel)


class RestBase:
    """Every method returns a future at once. A foreign or unknown id is `NotFoundError`."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        policy: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or Transport(resolve_endpoint(base_url, api_key), policy or RetryPolicy())

    def _get(self, path: str, answer: type[M], **params: Any) -> APIFuture[M]:
        given = {name: value for name, value in params.items() if value is not None}
        return APIFuture.start(self._transport.ask("GET", path, answer, params=given or None))

    def _post(self, path: str, answer: type[M], body: Request) -> APIFuture[M]:
        return APIFuture.start(self._transport.ask("POST", path, answer, encode(body.body())))

    def _do(self, method: str, path: str, body: Request | None = None) -> APIFuture[None]:
        return APIFuture.start(self._act(Call(method, path, None if body is None else encode(body.body()))))

    async def _act(self, call: Call) -> None:
        await self._transport.send(call)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """For every method `x` there is `x_async`, which is awaited for the result itself."""
        method = getattr(type(self), name.removesuffix("_async"), None) if name.endswith("_async") else None
        if method is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        async def twin(*args: Any, **kwargs: Any) -> Any:
            return await method(self, *args, **kwargs)

        return twin

    def close(self) -> APIFuture[None]:
        """Close the connections."""
        return APIFuture.start(self._transport.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close().result()


def part(name: str) -> str:
    """An id as one part of a path; colons stay readable."""
    return quote(name, safe=":")


def checkpoint_route(tinker_path: str) -> str:
    """Where a checkpoint is managed."""
    run_id, kind, name = parse_checkpoint_path(tinker_path)
    return f"/training_runs/{part(run_id)}/checkpoints/{kind}/{part(name)}"
