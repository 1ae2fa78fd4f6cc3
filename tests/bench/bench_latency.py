"""What asking costs, beside vLLM's own HTTP routes in the same run: an idle replica, and one under load.

One real replica (vLLM's API server on the CPU, its development routes on) with kvctl-sidecar beside it. All callers
keep their connection and take turns, one call each; load is eight clients streaming, from a process of their own.

vLLM's routes go through the API server's event loop, which also serves the tokens; kvctl's go through the sidecar to
the engine thread itself. Under load both wait for the end of the engine's step, which is most of what is seen then.
`AdmissionStatus` asks the engine anew for each call; "check" is a reset that is only checked (validate_only), which
asks the engine too; "keep" really forgets the cache.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc, types_pb2

from sidecar.local.fleet import booted
from sidecar.local.layout import Replica
from sidecar.local.load import Load
from sidecar.local.programs import Settings
from tests.bench.figures import Cell, Report, Table, main, progress
from tests.bench.pairs import percentile, take_turns

ROOT = Path(__file__).resolve().parents[2]
LANES = 8
STREAM_TOKENS = 400
PATIENCE_S = 60.0
KEPT_S = 3.0
"""vLLM's server closes a connection that was not used for 5 s, which would fail the next call on it."""
BASELINE = "vLLM GET /is_sleeping"


@contextmanager
def replica() -> Iterator[Replica]:
    """Booted as `kvctl local up --replicas 1 --dev-mode` does it, with a state directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as state:
        before = os.environ.get("XDG_STATE_HOME")
        os.environ["XDG_STATE_HOME"] = state
        try:
            with booted(Settings(replicas=1, dev_mode=True)) as booting:
                yield booting.fleet.replicas[0]
        finally:
            if before is None:
                del os.environ["XDG_STATE_HOME"]
            else:
                os.environ["XDG_STATE_HOME"] = before


@contextmanager
def load(target: Replica) -> Iterator[None]:
    words = [sys.executable, "-m", "tests.bench.bench_latency", "--as-load", target.api]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError("the load ended before it had begun")
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the load ended by itself, code {process.returncode}")
        finally:
            process.stdin.close()
            process.wait(30)


async def as_load(target: str) -> None:
    """The loading process: streams until its stdin ends."""
    made = Load(target, lanes=LANES, tokens=STREAM_TOKENS)
    made.start()
    await made.wait_midstream()
    print("streaming", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await made.stop()


class Callers:
    """Each call says how long it took, milliseconds; what was answered is counted."""

    def __init__(self, target: Replica) -> None:
        self.answers: Counter[str] = Counter()
        self.pauses_us: list[int] = []
        host, port = target.api.rsplit(":", 1)
        self._http = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        self._http_used = 0.0
        self._channel = grpc.insecure_channel(target.sidecar, options=[("grpc.enable_http_proxy", 0)])
        self._stub = replica_pb2_grpc.CacheAdminStub(self._channel)

    def arms(self) -> dict[str, Callable[[], float]]:
        keep, fail = types_pb2.RUNNING_REQUESTS_KEEP, types_pb2.RUNNING_REQUESTS_FAIL
        return {
            BASELINE: lambda: self.http("GET", "/is_sleeping"),
            "vLLM POST /reset_prefix_cache": lambda: self.http("POST", "/reset_prefix_cache"),
            "kvctl AdmissionStatus": lambda: self._rpc("AdmissionStatus", self._admission),
            "kvctl reset, check": lambda: self._rpc("check", lambda: self._reset(fail, validate_only=True)),
            "kvctl reset, fail": lambda: self._rpc("fail", lambda: self._reset(fail)),
            "kvctl reset, keep": lambda: self._rpc("keep", lambda: self._reset(keep)),
        }

    def http(self, method: str, path: str) -> float:
        if time.monotonic() - self._http_used > KEPT_S:
            self._http.close()
            self._http.connect()
        began = time.perf_counter()
        self._http.request(method, path, headers={"Content-Length": "0"} if method == "POST" else {})
        answer = self._http.getresponse()
        answer.read()
        took = (time.perf_counter() - began) * 1000
        self._http_used = time.monotonic()
        self.answers[f"{path} {answer.status}"] += 1
        return took

    def _rpc(self, name: str, call: Callable[[], None]) -> float:
        began = time.perf_counter()
        code = "OK"
        try:
            call()
        except grpc.RpcError as error:
            code = error.code().name
        took = (time.perf_counter() - began) * 1000
        self.answers[f"{name} {code}"] += 1
        return took

    def _admission(self) -> None:
        self._stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=PATIENCE_S, wait_for_ready=True)

    def _reset(self, mode: types_pb2.RunningRequests.ValueType, *, validate_only: bool = False) -> None:
        request = api.ResetPrefixCacheRequest(running_requests=mode, validate_only=validate_only)
        answer = self._stub.ResetPrefixCache(request, timeout=PATIENCE_S, wait_for_ready=True)
        if not validate_only:
            self.pauses_us += [engine.pause.longest_us for engine in answer.engines]

    def close(self) -> None:
        self._http.close()
        self._channel.close()


def compare(state: str, target: Replica, rounds: int, bound_s: float, report: Report) -> None:
    callers = Callers(target)
    try:
        arms = callers.arms()
        for warm_up in arms.values():
            warm_up()
        callers.answers.clear()
        callers.pauses_us.clear()
        baseline = arms.pop(BASELINE)
        turns = take_turns(baseline, arms, rounds, bound_s)
    finally:
        callers.close()
    table = Table(
        f"{state}, milliseconds, {len(turns.baseline)} rounds",
        ("call", "p50", "p99", "longest", f"times {BASELINE} (quartiles)"),
    )

    def row(name: str, values: list[float], ratio: str) -> list[Cell]:
        return [name, statistics.median(values), percentile(values, 0.99), max(values), ratio]

    table.rows.append(row(BASELINE, turns.baseline, f"noise {turns.noise().text}"))
    table.rows += [row(name, values, turns.ratio(name).text) for name, values in turns.others.items()]
    report.tables.append(table)
    answered = ", ".join(f"{answer} ({count})" for answer, count in sorted(callers.answers.items()))
    pause = f"{statistics.median(callers.pauses_us):.0f}" if callers.pauses_us else "unknown"
    report.notes.append(f"{state}: answers {answered}; a reset held the engine for {pause} µs (median).")


def measure(quick: bool) -> Report:
    logging.disable(logging.CRITICAL)
    report = Report("latency")
    progress("booting a real replica")
    with replica() as target:
        progress("idle")
        compare("Idle", target, 30 if quick else 300, 60, report)
        progress("under load")
        with load(target):
            compare(f"{LANES} requests streaming", target, 15 if quick else 150, 30 if quick else 120, report)
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-load"]:
        asyncio.run(as_load(sys.argv[2]))
        sys.exit(0)
    sys.exit(main(measure))
