"""What one tenant can send to hurt the others, as a list: each is a small function that does it once, by plain HTTP.

`python -m bench.neighbour` measures a neighbour beside each, and tests/e2e/test_attacks.py holds the server's bounds. A
new attack is a function here, and an entry of ATTACKS.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import httpx
import weft
import zstandard
from weft import types

from bench.parts.serving import BASE_MODEL

MIB = 1 << 20
#: Optimizer steps in one attack.
STEPS = 100
#: Requests that one attack has open at a time.
AT_ONCE = 4
#: Points that one request may log.
POINTS = 1000
JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}


@dataclass(frozen=True)
class Target:
    """A server, and the attacker's key and run."""

    url: str
    key: str
    run_id: str = "none"

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Post, and return the status. A path that begins with a slash is the whole path."""
        headers, path = {"x-api-key": self.key, **headers}, path if path.startswith("/") else f"/api/v1/{path}"
        return httpx.post(f"{self.url}{path}", content=body, headers=headers, timeout=300).status_code

    def post_packed(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        return self.post(path, packed(body), {**headers, "content-encoding": "zstd"})

    def get_at_once(self, path: str, times: int = AT_ONCE) -> list[int]:
        """Send this many GETs before any answer is read; returns their statuses."""
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {self.key}\r\nConnection: close\r\n\r\n".encode()
        statuses = []
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(self.address, 60)) for _ in range(times)]
            for connection in connections:
                connection.sendall(head)
            for connection in connections:
                statuses.append(int(connection.recv(12, socket.MSG_WAITALL).split()[1]))
                while connection.recv(MIB):
                    continue
        return statuses


#: An attack, done once; returns the statuses of the answers.
Attack = Callable[[Target], list[int]]
_making = Lock()


def one_at_a_time(make: Callable[[Target], str]) -> Callable[[Target], str]:
    """What an attack needs is made only once, by the first of the threads that attack."""
    made = cache(make)

    def of(target: Target) -> str:
        with _making:
            return made(target)

    return of


@cache
def packed(body: bytes) -> bytes:
    return zstandard.compress(body)


@cache
def forward_json(inside: bytes, size_bytes: int) -> bytes:
    """A JSON forward with `inside` repeated as its list of data."""
    start = b'{"model_id": "none", "seq_id": 1, "forward_input": {"loss_fn": "cross_entropy", "data": ['
    return start + b",".join([inside] * (size_bytes // (len(inside) + 1))) + b"]}}"


@cache
def field(number: int, inside: bytes) -> bytes:
    """A protobuf field that contains `inside`."""
    size, length = len(inside), b""
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + inside


def packed_json(target: Target) -> list[int]:
    """A few kilobytes that unpack to 64 MB of JSON in which each element is wrong."""
    return [target.post_packed("forward", forward_json(b"{}", 60 * MIB), JSON)]


def packed_telemetry(target: Target) -> list[int]:
    body = b'{"events": [' + b",".join([b"{}"] * (20 * MIB)) + b"]}"
    return [target.post_packed("telemetry", body, JSON)]


def wrong_numbers(target: Target) -> list[int]:
    """Unpacked: as many numbers as fit in a body, each of them wrong."""
    data = b'{"model_input":{"chunks":[{"type":"encoded_text","tokens":[%s]}]},"loss_fn_inputs":{}}'
    return [target.post("forward", forward_json(data % (b"-1," * 190_000 + b"-1"), 6 * MIB), JSON)]


def many_objects(target: Target) -> list[int]:
    """As many objects as fit in a body."""
    return [target.post("forward", forward_json(b'{"model_input":{"chunks":[]},"loss_fn_inputs":{}}', 800_000), JSON)]


def many_names(target: Target) -> list[int]:
    """As many unknown fields as fit in a body."""
    body = b"{" + b",".join(b'"%d":1' % number for number in range(65_000)) + b"}"
    return [target.post("asample", body, JSON)]


def empty_data(target: Target) -> list[int]:
    """Two bytes of protobuf for each datum."""
    return [target.post("forward_backward", field(3, b"") * (16 * MIB), PROTOBUF)]


def packed_empty_data(target: Target) -> list[int]:
    return [target.post_packed("forward_backward", field(3, b"") * (30 * MIB), PROTOBUF)]


def empty_chunks(target: Target) -> list[int]:
    return [target.post("forward_backward", field(3, field(1, b"") * (16 * MIB)), PROTOBUF)]


def long_shapes(target: Target) -> list[int]:
    """A tensor with millions of dimensions, one byte each."""
    tensor = field(2, field(1, b"x") + field(2, field(4, b"\1" * (30 * MIB))))
    return [target.post("forward_backward", field(3, tensor), PROTOBUF)]


def long_text(target: Target) -> list[int]:
    """A prompt of millions of words, as text: its tokens would take gigabytes."""
    body = json.dumps({"model": BASE_MODEL, "prompt": "a 1 " * (5 * MIB), "max_tokens": 1}).encode()
    return [target.post("/v1/completions", body, JSON)]


def long_chat(target: Target) -> list[int]:
    message = {"role": "user", "content": "a 1 " * (5 * MIB)}
    body = json.dumps({"model": BASE_MODEL, "messages": [message], "max_tokens": 1}).encode()
    return [target.post("/v1/chat/completions", body, JSON)]


def wrong_messages(target: Target) -> list[int]:
    """As many messages as fit in a body, each of them wrong."""
    body = b'{"model": "%s", "messages": [%s1]}' % (BASE_MODEL.encode(), b"1," * 190_000)
    return [target.post("/v1/chat/completions", body, JSON)]


def many_stops(target: Target) -> list[int]:
    """As many stop strings as fit in a body."""
    body = b'{"model": "%s", "prompt": "a", "stop": [%s"b"]}' % (BASE_MODEL.encode(), b'"a",' * 190_000)
    return [target.post("/v1/completions", body, JSON)]


def many_tokens(target: Target) -> list[int]:
    """As long a prompt of tokens as fits in a body."""
    body = b'{"model": "%s", "prompt": [%s1]}' % (BASE_MODEL.encode(), b"20," * 190_000)
    return [target.post("/v1/completions", body, JSON)]


def tokenized(target: Target) -> list[int]:
    """A text of almost a MiB, repeatedly: tokenizing it costs the sender nothing."""
    body = json.dumps({"prompt": "a 1 " * (MIB // 4 - 100), "return_token_strs": True}).encode()
    return [target.post("/tokenize", body, JSON) for _ in range(4)]


@one_at_a_time
def _drawn(target: Target) -> str:
    """A run with a long curve."""
    run = target.run_id if target.run_id != "none" else new_run(target.url, target.key, BASE_MODEL)
    for start in range(0, 10 * POINTS, POINTS):
        points = [{"name": "loss", "step": step, "value": step * 0.1} for step in range(start, start + POINTS)]
        target.post(f"weft/runs/{run}/metrics", json.dumps({"points": points}).encode(), JSON)
    return run


def many_curves(target: Target) -> list[int]:
    """A long curve, many times at once."""
    return target.get_at_once(f"/api/v1/weft/runs/{_drawn(target)}/metrics?name=loss")


@one_at_a_time
def _talked(target: Target) -> str:
    """A session with large turns: many choices of one prompt, which is repeated in each."""
    body = {"model": BASE_MODEL, "prompt": list(range(20, 520)) * 2, "max_tokens": 1, "n": 256}
    for _ in range(4):
        target.post("/v1/completions", json.dumps(body).encode(), {**JSON, "x-session-id": "talk"})
    return "talk"


def many_turns(target: Target) -> list[int]:
    """Megabytes of turns, many times at once."""
    return target.get_at_once(f"/api/v1/weft/turns/{_talked(target)}")


def many_lists(target: Target) -> list[int]:
    """Small requests, as many at once as a client has connections."""
    return target.get_at_once("/api/v1/training_runs", 150)


def webhook(target: Target) -> list[int]:
    """Webhooks, which anybody can send: nothing is signed."""
    return [target.post_packed("stripe/webhook", b"[" * (60 * MIB), JSON)]


def unknown_polls(target: Target) -> list[int]:
    """Polls of unknown ids, one after another."""
    statuses = []
    with httpx.Client(base_url=f"{target.url}/api/v1", headers={"x-api-key": target.key}, timeout=60) as http:
        for number in range(300):
            statuses.append(http.post("/retrieve_future", json={"request_id": f"{number:032x}"}).status_code)
    return statuses


def half_sent_headers(target: Target) -> list[int]:
    """Connections that begin a request and do not continue."""
    with ExitStack() as stack:
        for _ in range(100):
            with suppress(OSError):
                connection = stack.enter_context(socket.create_connection(target.address, timeout=10))
                connection.sendall(b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-A: ")
        time.sleep(1)
    return []


def half_sent_bodies(target: Target) -> list[int]:
    """Large bodies that are announced and do not come."""
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {target.key}\r\n"
        f"Content-Type: {PROTOBUF['content-type']}\r\nContent-Length: {60 * MIB}\r\n\r\n"
    )
    with ExitStack() as stack:
        for _ in range(20):
            with suppress(OSError):
                connection = stack.enter_context(socket.create_connection(target.address, timeout=10))
                connection.sendall(head.encode() + bytes(100_000))
        time.sleep(1)
    return []


def long_trailer(target: Target) -> list[int]:
    """A chunked body, followed by a header that does not end."""
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-API-Key: {target.key}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: "
    )
    with suppress(OSError), socket.create_connection(target.address, timeout=10) as connection:
        connection.sendall(head.encode() + b"0\r\nX-A: ")
        for _ in range(100):
            connection.sendall(b"a" * MIB)
    return []


def many_steps(target: Target) -> list[int]:
    """Hundreds of dimuon steps of rank 128 without tokens, sent at once without waiting."""
    run = new_run(target.url, target.key, BASE_MODEL, rank=128, optimizer="dimuon")
    params = {"type": "dimuon", "learning_rate": 1e-4}
    bodies = [
        json.dumps({"model_id": run, "seq_id": seq, "optimizer_params": params}).encode() for seq in range(1, STEPS + 1)
    ]
    return [target.post("optim_step", body, JSON) for body in bodies]


def slow_losses(target: Target) -> list[int]:
    """Uploaded losses of many nodes over many short data."""
    with weft.ServiceClient(base_url=target.url, api_key=target.key) as service:
        loss = service.create_custom_loss(_sorting, {"logprobs": 1, "weights": 1}).result()
        run = service.create_lora_training_client(BASE_MODEL, rank=8).result()
        inputs = {"target_tokens": [20], "weights": [1.0]}
        data = [types.Datum(types.ModelInput.from_ints([21]), inputs) for _ in range(512)]
        with suppress(weft.errors.WeftError):
            run.forward_backward_custom(data, loss).result()
    return []


def _sorting(logprobs: Any, weights: Any) -> Any:
    for _ in range(100):
        logprobs = logprobs.sort(dim=0)[0]
    return (logprobs * weights).sum(), {}


#: By name, which is the name of the result and the id of a test.
ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        packed_json,
        packed_telemetry,
        wrong_numbers,
        many_objects,
        many_names,
        empty_data,
        packed_empty_data,
        empty_chunks,
        long_shapes,
        long_text,
        long_chat,
        wrong_messages,
        many_stops,
        many_tokens,
        tokenized,
        many_curves,
        many_turns,
        webhook,
        unknown_polls,
        half_sent_headers,
        half_sent_bodies,
        long_trailer,
    )
}
#: Accepted requests to be weighed: they take time of the machines, not of the front. The last one leaves most behind.
WORK: dict[str, Attack] = {attack.__name__: attack for attack in (many_lists, slow_losses, many_steps)}


def new_run(url: str, key: str, base_model: str, rank: int = 8, optimizer: str = "adamw") -> str:
    """A run of the attacker, for attacks that need one."""
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=60) as http:

        def ask(path: str, **fields: Any) -> Any:
            reply = http.post(f"/{path}", content=json.dumps(fields).encode(), headers=JSON)
            while reply.status_code == 408:
                reply = http.post(f"/{path}", content=json.dumps(fields).encode(), headers=JSON)
            reply.raise_for_status()
            return reply.json()

        session = ask("create_session", sdk_version="attack")["session_id"]
        made = ask(
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model=base_model,
            lora_config={"rank": rank},
            optimizer_config={"type": optimizer},
        )
        ask("retrieve_future", request_id=made["request_id"])
        return str(made["model_id"])
