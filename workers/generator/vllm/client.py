"""The part of vLLM's HTTP interface that the engine uses, over TCP or a UNIX socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

#: No read timeout: a request may be queued and generated for long, and a dead process closes the connection.
_TIMEOUT = httpx.Timeout(None, connect=10.0)
#: vLLM closes a connection that is idle for five seconds (uvicorn's default). A request sent at that moment would be
#: taken for lost, and computed anew.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)


class VllmLost(Exception):
    """The server does not answer, or its engine is dead: its requests are lost."""


class VllmRefused(Exception):
    """The server refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class VllmClient:
    """One server, at http://HOST:PORT or unix:PATH. Lives in one event loop."""

    def __init__(self, url: str) -> None:
        socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=_LIMITS) if socket else None
        base = "http://vllm" if socket else url
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=_TIMEOUT, limits=_LIMITS)

    async def close(self) -> None:
        await self._http.aclose()

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=10.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def models(self) -> dict[str, int]:
        """Names of the models it serves, with the tokens of the longest sequence of each."""
        found = await self._ask("GET", "/v1/models", None, {})
        return {model["id"]: int(model.get("max_model_len") or 0) for model in found["data"]}

    async def about(self) -> dict[str, Any]:
        """What Weft's plugin reports about this server; empty without the plugin."""
        try:
            (about, *_) = await self.rpc("weft_about")
        except VllmRefused:
            return {}
        return dict(about)

    async def options(self) -> dict[str, Any]:
        """The set options that change its numbers; empty if the server does not tell its options."""
        try:
            config = (await self._ask("GET", "/server_info", None, {"config_format": "json"}))["vllm_config"]
        except VllmRefused:
            return {}
        found = {
            "quantization": config["model_config"].get("quantization"),
            "kv_cache_dtype": config["cache_config"].get("cache_dtype"),
            "speculative_config": config.get("speculative_config"),
            "kv_transfer_config": config.get("kv_transfer_config"),
        }
        return {name: value for name, value in found.items() if value not in (None, "auto", "bfloat16", "float16")}

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens in, tokens out."""
        return dict(await self._post("/inference/v1/generate", body))

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The same in pieces, as tokens come; the last piece has no choice and the usage."""
        content = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", "/inference/v1/generate", content=content, headers=headers) as reply:
                if reply.status_code >= 400:
                    await reply.aread()
                    await self._raise(reply, "/inference/v1/generate")
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        yield orjson.loads(line[6:])
        except httpx.HTTPError as error:
            raise VllmLost(f"stream: {type(error).__name__}: {error}") from error

    async def abort(self, request_ids: list[str]) -> None:
        """End requests: each is answered with the tokens that it has."""
        names = [f"generate-tokens-{request_id}" for request_id in request_ids]
        await self._post("/inference/v1/abort_requests", {"request_ids": names})

    async def load_adapter(self, name: str, folder: str) -> int:
        """Load an adapter under a new name. Returns its number in the engine."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        (numbers, *_) = await self.rpc("weft_adapters")
        return int(max(numbers))

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def swap(self, adapters: list[tuple[str, int, str]], epoch: int) -> None:
        """Replace weights of adapters (name, number, folder) in place, between two steps; tokens generated from then on
        are labelled `epoch`."""
        await self._post("/pause", None, mode="keep")
        try:
            for name, number, folder in adapters:
                await self.rpc("weft_swap", name, number, folder)
            await self.label(epoch)
        finally:
            await self._post("/resume", None)

    async def label(self, epoch: int) -> None:
        """Label the tokens that are generated from now on."""
        await self._post("/update_weight_version", {"new_version": str(epoch)})

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        found = await self._post("/collective_rpc", {"method": method, "args": list(args)})
        return list(found["results"])

    async def _post(self, path: str, body: dict[str, Any] | None, **query: str) -> Any:
        return await self._ask("POST", path, body, query)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, query: dict[str, str]) -> Any:
        content = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        try:
            reply = await self._http.request(method, path, content=content, params=query, headers=headers)
        except httpx.HTTPError as error:
            raise VllmLost(f"{path}: {type(error).__name__}: {error}") from error
        await self._raise(reply, path)
        kind = reply.headers.get("content-type", "")
        return orjson.loads(reply.content) if kind.startswith("application/json") else None

    async def _raise(self, reply: httpx.Response, path: str) -> None:
        if reply.status_code >= 500 and not await self.healthy():
            raise VllmLost(f"{path}: status {reply.status_code}: {reply.text[:300]}")
        if reply.status_code >= 400:
            raise VllmRefused(reply.status_code, _message(reply))


def _message(reply: httpx.Response) -> str:
    try:
        found = reply.json()
        return str(found["error"]["message"] if isinstance(found.get("error"), dict) else found)
    except (ValueError, KeyError, AttributeError):
        return reply.text[:300]
