"""The protocol by hand: requests as bytes, over connections that break wherever a test wants."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

import httpx
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, encode_train_request

from tests.e2e.conftest import BASE_MODEL, Weftd

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Post:
    """One request: its path below /api/v1, and its body."""

    path: str
    body: bytes
    content_type: str = "application/json"


class RawClient:
    """One organisation's client without any retries."""

    def __init__(self, weftd: Weftd, organisation: str) -> None:
        self.key = weftd.key(organisation)
        self.address = weftd.url.removeprefix("http://")
        self.http = httpx.Client(base_url=f"{weftd.url}/api/v1", headers={"X-API-Key": self.key}, timeout=60)
        created = self.json("create_session", tags=[], user_metadata={}, sdk_version="raw", type="create_session")
        self.session_id = created["session_id"]
        self._runs = 0

    def json(self, endpoint: str, /, **fields: Any) -> Any:
        reply = self.http.post(f"/{endpoint}", json=fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def new_run(self, rank: int = 4, seed: int = 5) -> str:
        config = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True}
        number, self._runs = self._runs, self._runs + 1
        future = self.json(
            "create_model",
            session_id=self.session_id,
            model_seq_id=number,
            base_model=BASE_MODEL,
            lora_config=config,
            type="create_model",
        )
        return str(json.loads(self.result(future["request_id"]))["model_id"])

    def post(self, post: Post) -> httpx.Response:
        return self.http.post(f"/{post.path}", content=post.body, headers={"Content-Type": post.content_type})

    def broken_post(self, post: Post, sent_share: float) -> None:
        """Send that share of the body (1: all of it), then hang up without waiting for the answer."""
        host, port = self.address.split(":")
        head = (
            f"POST /api/v1/{post.path} HTTP/1.1\r\nHost: {self.address}\r\nX-API-Key: {self.key}\r\n"
            f"Content-Type: {post.content_type}\r\nContent-Length: {len(post.body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + post.body[: int(len(post.body) * sent_share)])

    def result(self, request_id: str) -> bytes:
        """The result of an operation, from protobuf or JSON."""
        while True:
            body = {"request_id": request_id, "allow_metadata_only": False}
            reply = self.http.post("/retrieve_future", json=body, headers={"Accept": f"{PROTOBUF}, application/json"})
            if reply.status_code != 408:
                assert reply.status_code == 200, reply.text
                return reply.content


def train_post(run_id: str, seq: int, data: list[ArrayDatum], forward_only: bool = False) -> Post:
    batch = TrainBatch(run_id, seq, "cross_entropy", forward_only=forward_only, data=data)
    return Post("forward_backward", encode_train_request(batch), PROTOBUF)


def optim_post(run_id: str, seq: int, learning_rate: float) -> Post:
    params = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    body = {"model_id": run_id, "seq_id": seq, "adam_params": params, "type": "optim_step"}
    return Post("optim_step", json.dumps(body).encode())
