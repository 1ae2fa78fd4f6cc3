"""Spans of a sidecar, as an OpenTelemetry collector gets them. Here because vLLM brings OpenTelemetry along."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collected
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.contract.sidecar_process import SidecarProcess, run_to_end

pytestmark = pytest.mark.engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LIMIT_S = 60


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: queue.Queue[tuple[str, Span]] = queue.Queue()

    def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put((service, span))
        return collected.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait(LIMIT_S)


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o700)
    return directory


def ask(sidecar: SidecarProcess) -> None:
    with sidecar.stub() as stub:
        stub.GetReplica(
            api.GetReplicaRequest(), timeout=LIMIT_S, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        )


def test_each_call_is_a_span_of_its_callers_trace(engine_dir, tmp_path, collector):
    found, url = collector
    sidecar = SidecarProcess(
        engine_dir, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_BSP_SCHEDULE_DELAY="50", no_proxy="*"
    )
    try:
        ask(sidecar)
        service, span = found.spans.get(timeout=LIMIT_S)
        assert (service, span.name) == ("kvctl-sidecar", "/kvctl.v1.CacheAdmin/GetReplica")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.kind == Span.SPAN_KIND_SERVER
    finally:
        sidecar.end()


def test_a_collector_that_is_down_costs_neither_a_call_nor_the_end(engine_dir, tmp_path):
    sidecar = SidecarProcess(
        engine_dir, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_BSP_SCHEDULE_DELAY="50"
    )
    try:
        for _ in range(3):
            ask(sidecar)
        assert sidecar.terminate() == 0
        assert "Traceback" not in sidecar.log()
    finally:
        sidecar.end()


def test_an_address_of_a_collector_that_is_none_is_told_at_the_start(engine_dir):
    ended = run_to_end("--engine-dir", str(engine_dir), "--listen", "127.0.0.1:0", "--metrics", "off",
                       OTEL_EXPORTER_OTLP_ENDPOINT="http://[::1")  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvctl-sidecar: OTEL_EXPORTER_OTLP_ENDPOINT is 'http://[::1', which is no address")
