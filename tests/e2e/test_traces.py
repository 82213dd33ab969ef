"""One trace of a request through API, scheduler, worker and settling, as a real OTLP receiver gets it; and the
request's id in the logs of all of them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from store import tracing
from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.production import production_of
from tests.forked import run_forked
from tests.servers import OwnRedis, PostgresServer
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="pip install 'weft-tuning-server[otel]'")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.server
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
#: Tokens that must be in no log and no span.
PROMPT = [101, 707, 313, 909]
LOSS = "cross_entropy"


class Receiver(ThreadingHTTPServer):
    """The part of a collector's /v1/traces that is needed: it keeps what was sent, by service, and by which process."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []
        self.raw: list[bytes] = []
        self.pids: dict[bytes, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of_trace(self, trace_id: str) -> list[tuple[str, Span]]:
        return [(service, span) for service, span in list(self.spans) if span.trace_id.hex() == trace_id]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        request = ExportTraceServiceRequest.FromString(body)
        self.server.raw.append(body)
        for resource in request.resource_spans:
            named = {found.key: found.value.string_value for found in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += [(named["service.name"], span) for span in scope.spans]
                pid = int(named["service.instance.id"].rpartition(":")[2])
                self.server.pids |= {span.span_id: pid for span in scope.spans}
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the log quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.shutdown()


def traced(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds between two messages


def batch(run_id: str) -> dict[str, Any]:
    """The body of a run's first forward_backward."""
    inputs = {
        "target_tokens": {"data": PROMPT[1:], "dtype": "int64"},
        "weights": {"data": [1.0] * 3, "dtype": "float32"},
    }
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": PROMPT[:-1]}]}, "loss_fn_inputs": inputs}
    return {"model_id": run_id, "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": LOSS}}


def test_one_trace_and_one_id_through_everything(
    own_weftd: Callable[..., Weftd], receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(monkeypatch, receiver.url)
    config = tmp_path / "weft.toml"
    config.write_text('logs = { format = "json", level = "debug" }\n')
    server = own_weftd("--config", str(config))
    key = server.key("acme")
    headers = {"x-request-id": "traced-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    service = tinker.ServiceClient(base_url=server.url, api_key=key)
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    sample = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 2},
    }
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": key}, timeout=60) as http_client:
        for path, body in (("forward_backward", batch(run.model_id)), ("asample", sample)):
            accepted = http_client.post(path, json=body, headers=headers)
            assert accepted.headers["x-request-id"] == "traced-1", accepted.text
            result = http_client.post("retrieve_future", json={"request_id": accepted.json()["request_id"]})
            assert result.status_code == 200, result.text
            assert "error" not in result.text
    assert server.stop() == 0

    spans = receiver.of_trace(TRACE)
    by_service = {(name, span.name) for name, span in spans}
    assert {
        ("weft-api", "POST /api/v1/forward_backward"),
        ("weft-api", "operation forward_backward"),
        ("weft-api", "queue"),
        ("weft-api", "work"),
        ("weft-api", "settle"),
        ("weft-trainer", "train forward_backward"),
        ("weft-api", "operation sample"),
        ("weft-generator", "generate"),
    } <= by_service
    ids = {span.span_id: span for _, span in spans}
    for _, span in spans:  # one tree below the client's own span
        assert span.parent_span_id in ids or span.parent_span_id.hex() == PARENT, span.name
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    (http,) = [span for _, span in spans if span.name == "POST /api/v1/forward_backward"]
    below = {span.name for _, span in spans if span.parent_span_id == http.span_id}
    assert below == {"operation forward_backward", "train forward_backward"}

    lines = [json.loads(line) for line in server.log().splitlines()]
    about = [line for line in lines if line.get("request") == "traced-1" and "operation" in line]
    trained = {line["program"] for line in about if line["message"].startswith("forward_backward")}
    assert trained == {"api", "trainer"}
    assert "generator" in {line["program"] for line in about}
    assert len({line["org"] for line in about}) == 1
    (run_id,) = {line["run"] for line in about if line["message"] == "forward_backward done"}
    assert run_id == run.model_id
    told = server.log().encode() + b"".join(receiver.raw)
    for secret in (key, key.rpartition("_")[2], ", ".join(map(str, PROMPT)), ",".join(map(str, PROMPT))):
        assert secret.encode() not in told


@pytest.mark.timeout(300)
def test_one_trace_through_a_replica_the_leader_and_the_workers(
    receiver: Receiver,
    tmp_path: Path,
    postgres: PostgresServer,
    migrated_postgres: str,
    own_redis: OwnRedis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sent to a replica that does not lead: accepting, scheduling and computing are different processes."""
    traced(monkeypatch, receiver.url)
    with production_of(tmp_path, postgres, migrated_postgres, own_redis.url) as production:
        workers = {role: production.worker(role) for role in ("trainer", "generator")}
        replicas = production.serve(2)
        leader = production.leader(replicas)
        (other,) = replicas.keys() - {leader}
        key = production.key()
        run = tinker.ServiceClient(base_url=other, api_key=key).create_lora_training_client(BASE_MODEL, rank=4).result()
        run.get_info()
        asked(other, key, run.model_id)
        wanted = {"train forward_backward", "work", "settle", "POST /api/v1/forward_backward"}
        until(
            lambda: wanted <= {span.name for _, span in receiver.of_trace(TRACE)}, said=lambda: receiver.of_trace(TRACE)
        )
        spans = receiver.of_trace(TRACE)
        pids = {span.name: receiver.pids[span.span_id] for _, span in spans}
        assert pids["POST /api/v1/forward_backward"] == replicas[other].pid
        assert {pids[name] for name in ("queue", "work", "settle")} == {replicas[leader].pid}
        assert pids["train forward_backward"] == workers["trainer"].pid
        ids = {span.span_id for _, span in spans}
        assert all(span.parent_span_id in ids or span.parent_span_id.hex() == PARENT for _, span in spans)


def asked(url: str, key: str, run_id: str) -> None:
    """Send one batch as a client whose span is PARENT; returns when it is done."""
    headers = {"x-api-key": key, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    accepted = httpx.post(f"{url}/api/v1/forward_backward", json=batch(run_id), headers=headers, timeout=60)
    result = {"try_again": True}
    while "try_again" in str(result):
        body = {"request_id": accepted.json()["request_id"]}
        about = {"x-api-key": key, "accept": "application/json"}  # else the answer is protobuf
        result = httpx.post(f"{url}/api/v1/retrieve_future", json=body, headers=about, timeout=60).json()
    assert "loss:sum" in str(result)


AWAY = """
import time
from datetime import datetime
from store import tracing
tracing.configure("weft-trainer")
began = time.monotonic()
for _ in range(20_000):
    tracing.span("train", "request", datetime.now(), datetime.now(), {"run": "r"})
made = time.monotonic()
tracing.stop()
print(made - began, time.monotonic() - made)
"""


def test_a_receiver_that_is_away_holds_nobody() -> None:
    """Nobody answers at 192.0.2.1, so a connection to it ends only by its time limit."""
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://192.0.2.1:4318"}
    ran = run_forked("-c", AWAY, env=environment)
    making_s, stopping_s = map(float, ran.stdout.split())
    assert making_s < 20
    assert stopping_s < tracing.FLUSH_S + 2


OFF = """
import sys
from datetime import datetime
from api.http.requests import Requests
from scheduler.links.configs import Basics
from store import tracing
from workers.basics import say_as
say_as(Basics("", {}))
tracing.span("train", "origin", datetime.now(), datetime.now())
with tracing.request("GET", {}) as span:
    assert span is None and tracing.origin_here() == ""
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_off_it_is_not_even_imported() -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    off = asked | {"OTEL_SDK_DISABLED": "true"}
    assert [tracing.wanted(found) for found in ({}, asked, off)] == [False, True, False]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | off
    ran = subprocess.run([sys.executable, "-c", OFF], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_protocol_that_is_not_spoken_is_refused(tmp_path: Path) -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    command = ("-m", "weft_server", "serve", "--data-dir", str(tmp_path), "--port", "0")
    ran = run_forked(*command, env=os.environ | asked)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=grpc" in ran.stderr
