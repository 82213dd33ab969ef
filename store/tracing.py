"""OpenTelemetry traces, from a request to the settling of its operations. If they are off, no OpenTelemetry module is
imported.

They are on if the standard environment names a receiver (OTEL_EXPORTER_OTLP_ENDPOINT, or ..._TRACES_ENDPOINT), and the
extra `otel` is installed; everything else that OpenTelemetry reads of its environment holds too. A request's span is
the parent of its operations', wherever they run: an operation carries W3C's `traceparent` in its origin.

A span has kinds, ids and counts; never a body, a prompt or a key.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

from store import logs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
#: How long the end of a process waits for spans to be sent.
FLUSH_S = 3.0

Value = str | int | float | bool

_OFF = nullcontext()


class TracingError(ValueError):
    """Traces are asked for but cannot be sent; the message is one line for the operator."""


class _Parts:
    """This process's tracer and exporter; None while traces are off."""

    provider: TracerProvider | None = None
    tracer: Tracer | None = None


def configure(program: str) -> None:
    """Send traces if the environment says so; `program` is the service (weft-api, weft-trainer, ...) unless
    OTEL_SERVICE_NAME has another name, and HOST:PID is which of its processes. Raises TracingError."""
    if not wanted(os.environ):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        names = " or ".join(_ENDPOINTS)
        raise TracingError(f"{names} asks for traces: pip install 'weft-tuning-server[otel]' ({error})") from None
    name = os.environ.get("OTEL_SERVICE_NAME") or program
    about = {SERVICE_NAME: name, SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}"}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _Parts.provider, _Parts.tracer = provider, trace.get_tracer("weft", tracer_provider=provider)


def wanted(environment: Mapping[str, str]) -> bool:
    """True if traces are to be sent. Raises TracingError for an unsupported protocol."""
    if not any(environment.get(name) for name in _ENDPOINTS):
        return False
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    for name in _PROTOCOLS:
        if environment.get(name, "http/protobuf") != "http/protobuf":
            raise TracingError(f"{name}={environment[name]}: traces are sent by http/protobuf alone (port 4318)")
    return True


def on() -> bool:
    """True if this process sends traces."""
    return _Parts.tracer is not None


def stop() -> None:
    """Send the waiting spans; called before this process ends."""
    if _Parts.provider is not None:
        ending = threading.Thread(target=_Parts.provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(FLUSH_S)  # on its own it would wait for half a minute
        _Parts.provider = _Parts.tracer = None


def request(method: str, headers: Mapping[bytes, bytes]) -> AbstractContextManager[Span | None]:
    """The span of an HTTP request, which is the current one in the block."""
    return _OFF if _Parts.tracer is None else _request(_Parts.tracer, method, headers)


@contextmanager
def _request(tracer: Tracer, method: str, headers: Mapping[bytes, bytes]) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind, use_span

    given = headers.get(b"traceparent", b"").decode("latin-1")
    span = tracer.start_span(method, context=_context(given), kind=SpanKind.SERVER)
    with use_span(span, end_on_exit=True, record_exception=False):
        yield span


def answered(span: Span | None, method: str, route: str, status: str, about: Mapping[str, str]) -> None:
    """Facts about an answered request, by OpenTelemetry's names for HTTP; `about` are those of the log."""
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    span.update_name(f"{method} {route}")
    facts = {f"weft.{name}": fact for name, fact in about.items()}
    span.set_attributes({"http.request.method": method, "http.route": route, **facts})
    if status.isdigit():
        span.set_attribute("http.response.status_code", int(status))
        if status >= "500":
            span.set_status(StatusCode.ERROR)


def span(
    name: str,
    origin: str,
    start: datetime,
    end: datetime,
    attributes: Mapping[str, Value | None] | None = None,
    *,
    failed: bool = False,
) -> str:
    """Make a span that has already ended, as a child of the request in `origin` (`origin_here`). Returns the origin for
    its own children."""
    if _Parts.tracer is None:
        return origin
    from opentelemetry.trace import StatusCode

    request_id, _, parent = origin.partition(" ")
    made = _Parts.tracer.start_span(name, context=_context(parent), start_time=_ns(start))
    made.set_attributes({f"weft.{key}": value for key, value in (attributes or {}).items() if value})
    if failed:
        made.set_status(StatusCode.ERROR)
    made.end(_ns(max(start, end)))
    return f"{request_id} {_traceparent(made)}"


def origin_here() -> str:
    """The origin of an operation that is accepted now: its request's id and, if traces are on, a space and its
    `traceparent`. "" outside of a request."""
    request_id = logs.about().get("request", "")
    if _Parts.tracer is None:
        return request_id
    from opentelemetry.trace import get_current_span

    return f"{request_id} {_traceparent(get_current_span())}".rstrip()


def request_of(origin: str) -> str:
    """The id of the request in an operation's origin."""
    return origin.partition(" ")[0]


def _context(traceparent: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _traceparent(span: Span) -> str:
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else ""


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1e9)
