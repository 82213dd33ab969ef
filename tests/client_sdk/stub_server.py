"""A small real HTTP server that follows the protocol, keeps all requests, and fails when told to."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response
from weft.wire.binary.train_codec import decode_train_request, encode_train_output

PROTOBUF = "application/x-protobuf"
SESSION = "5e551011"


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    query: dict[str, str]

    @property
    def json(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.body)
        return loaded


@dataclass
class Stub:
    """`faults[path]` are the answers to give first; `results` holds what a request id resolves to."""

    base_url: str = ""
    asked: list[Asked] = field(default_factory=list)
    faults: dict[str, list[Response]] = field(default_factory=lambda: defaultdict(list))
    results: dict[str, Response] = field(default_factory=dict)
    replies: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    submitted: dict[tuple[str, int], str] = field(default_factory=dict)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """The JSON bodies of all requests to `path`, in order."""
        return [asked.json for asked in self.asked if asked.path == path]

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    async def answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/api/v1")
        body = await request.body()
        asked = Asked(request.method, path, body, dict(request.headers), dict(request.query_params))
        self.asked.append(asked)
        if self.faults[path]:
            return self.faults[path].pop(0)
        if f"{request.method} {path}" in self.replies:
            reply = self.replies[f"{request.method} {path}"]
            return reply if isinstance(reply, Response) else JSONResponse(reply)
        handler = getattr(self, "on_" + path.strip("/").replace("/", "_"), None)
        return handler(asked) if handler else JSONResponse({})

    def promise(self, lane: str, seq: int, result: Response) -> Response:
        """A request id, the same for the same number, that resolves to `result`."""
        request_id = self.submitted.setdefault((lane, seq), f"r-{lane}-{seq}")
        self.results.setdefault(request_id, result)
        return JSONResponse({"request_id": request_id})

    def on_client_config(self, asked: Asked) -> Response:
        return JSONResponse(self.config)

    def on_create_session(self, asked: Asked) -> Response:
        return JSONResponse({"session_id": SESSION})

    def on_create_model(self, asked: Asked) -> Response:
        number = asked.json["model_seq_id"]
        return self.promise(f"make{number}", 0, JSONResponse({"model_id": f"{SESSION}:train:{number}"}))

    def on_load_weights(self, asked: Asked) -> Response:
        body = asked.json
        lane, seq = (body["model_id"], body["seq_id"]) if "model_id" in body else ("load", body["model_seq_id"])
        return self.promise(lane, seq, JSONResponse({"path": body["path"]}))

    def on_get_info(self, asked: Asked) -> Response:
        info = {"model_id": asked.json["model_id"], "model_data": {"model_name": "org/tiny"}, "lora_rank": 8}
        return JSONResponse(info)

    def on_forward_backward(self, asked: Asked) -> Response:
        """Logprobs are minus the target tokens; the loss is -sum of logprob * weight."""
        batch = decode_train_request(asked.body)
        outputs = [{"logprobs": -datum.inputs["target_tokens"].astype(np.float32)} for datum in batch.data]
        losses = [
            -float((out["logprobs"] * datum.inputs["weights"]).sum()) if "weights" in datum.inputs else 0.0  # type: ignore[operator]
            for out, datum in zip(outputs, batch.data, strict=True)
        ]
        payload = encode_train_output(outputs, {"loss:sum": sum(losses), "tokens:max": float(len(batch.data))})
        return self.promise(batch.model_id, batch.seq_id, Response(payload, media_type=PROTOBUF))

    def on_optim_step(self, asked: Asked) -> Response:
        return self.promise(asked.json["model_id"], asked.json["seq_id"], JSONResponse({"metrics": {"norm": 1.0}}))

    def on_save_weights(self, asked: Asked) -> Response:
        body = asked.json
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        return self.promise(body["model_id"], body["seq_id"], JSONResponse({"path": path}))

    def on_save_weights_for_sampler(self, asked: Asked) -> Response:
        body = asked.json
        result = {"sampling_session_id": f"{SESSION}:sample:{body.get('sampling_session_seq_id')}"}
        if "path" in body:
            result = {"path": f"tinker://{body['model_id']}/sampler_weights/{body['path']}"}
        return self.promise(body["model_id"], body["seq_id"], JSONResponse(result))

    def on_create_sampling_session(self, asked: Asked) -> Response:
        return JSONResponse({"sampling_session_id": f"{SESSION}:sample:{asked.json['sampling_session_seq_id']}"})

    def on_asample(self, asked: Asked) -> Response:
        """Every sequence is the prompt again."""
        body = asked.json
        tokens = np.array(body["prompt"]["chunks"][0]["tokens"], np.int32)
        one = SequenceResult(tokens, -np.ones(len(tokens), np.float32), "length")
        prompt = np.concatenate([[np.nan], -np.ones(len(tokens) - 1)]).astype(np.float32)
        payload = encode_sample_response(
            [one] * body["num_samples"], prompt if body.get("prompt_logprobs") else None, prompt_cache_hit_tokens=1
        )
        lane = body["sampling_session_id"]
        self.promise(lane, body["seq_id"], Response(payload, media_type=PROTOBUF))
        names = [f"q{body['seq_id']}-{index}" for index in range(body["num_samples"])]
        return JSONResponse({"request_id": self.submitted[lane, body["seq_id"]], "sample_sequence_ids": names})

    def on_retrieve_future(self, asked: Asked) -> Response:
        return self.results[asked.json["request_id"]]


def not_yet() -> Response:
    """The answer of a long poll that timed out."""
    return JSONResponse({"type": "try_again", "request_id": "r", "queue_state": "active"}, status_code=408)


def status(code: int, detail: str = "no", **headers: str) -> Response:
    """An error status, answered by the server itself."""
    return JSONResponse({"detail": detail, "code": "stub"}, status_code=code, headers=headers)


def page(code: int) -> Response:
    """An error status, answered by a proxy in front of it."""
    return Response(f"<html><h1>{code}</h1>nginx</html>", code, media_type="text/html")


def serve(stub: Stub, port: int = 0) -> uvicorn.Server:
    """Start `stub` on a free port, or on `port`, in a thread of its own."""
    route = Route("/{rest:path}", stub.answer, methods=["GET", "POST", "PUT", "DELETE"])
    config = uvicorn.Config(Starlette(routes=[route]), host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.005)
    stub.base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    return server
