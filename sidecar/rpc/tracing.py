"""W3C trace context: taken from a caller, shown in logs and audit lines, passed on to the next hop.

That much needs no library: a `traceparent` is one line of text. Spans are made only when the `otel` extra is installed
and an exporter is configured by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT); everything else then
works the same, and a collector that is down costs no call anything.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

LOG: Final = logging.getLogger(__name__)

TRACE_PARENT: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("traceparent", default="")
"""Trace context of the running call; empty when the caller sent none or it is malformed."""

_FORM: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

SpanMaker = Callable[[str], contextlib.AbstractContextManager[None]]
"""Opens a span with this name around a call and makes it the context that is passed on."""


def read(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """The caller's trace context; empty when there is none or it is malformed."""
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""


def trace_id() -> str:
    """Of the running call, 32 hex digits; empty without a trace."""
    match = _FORM.fullmatch(TRACE_PARENT.get())
    return match.group(1) if match else ""


def metadata() -> tuple[tuple[str, str], ...]:
    """What the next hop is sent."""
    parent = TRACE_PARENT.get()
    return (("traceparent", parent),) if parent else ()


def check_endpoint(name: str, value: str) -> None:
    """ValueError when the variable of this name holds no address of a collector: a URL, or host:port."""
    try:
        parts = urlsplit(value if "//" in value else f"//{value}")
        usable = bool((parts.hostname or "").strip()) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{name} is {value!r}, which is no address; expected one such as http://collector:4317")


def span_maker(service: str) -> SpanMaker | None:
    """Makes spans when OpenTelemetry is installed and configured; None otherwise. Starts its exporter's thread.

    ValueError names the variable whose address is none.
    """
    named = [name for name in _ENDPOINTS if os.environ.get(name)]
    if not named:
        return None
    try:
        from opentelemetry import context, trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        LOG.warning("no spans are made although %s is set: %s; install kvctl[otel]", named[0], error)
        return None
    for name in named:
        check_endpoint(name, os.environ[name])
    # Not flushed at exit: a collector that is down would hold up the end of the process by its retries.
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("kvctl")
    propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def make(name: str) -> Iterator[None]:
        parent = propagator.extract({"traceparent": TRACE_PARENT.get()}, context.Context())
        with tracer.start_as_current_span(name, parent, kind=trace.SpanKind.SERVER):
            carrier: dict[str, str] = {}
            propagator.inject(carrier)
            TRACE_PARENT.set(carrier.get("traceparent", TRACE_PARENT.get()))
            yield

    return make
