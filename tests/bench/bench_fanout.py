"""How long one reset takes over 8 to 1,000 replicas, and what it costs the caller.

    python -m tests.bench.bench_fanout [--sizes 8,128,512,1000] [--json FILE] [--router]

Replicas are fakes that answer at once, in several processes on this machine, so that what is measured is the caller and
gRPC on both ends of loopback; on a real network the slowest replica adds its round trip. Three callers:

- `direct`: kvctl's own fan-out, without a record;
- `coordinator`: kvctl-coordinator, each intent and result on disk before it counts;
- `router` (--router): PyPI's sglang-router, put into build/bench/sglang-router, where it disturbs nothing else: POST
  /flush_cache, which it sends to all its workers. It keeps connections open from its health checks, so it has no cold
  row.

cold: connections are made; warm: they are kept from before (the median of WARM_RUNS by wall time). Wall is from the
request to the last result; p50 and p99 are of single calls; skew is between the first and the last effect at the
replicas, on the machine's clock; CPU is the calling process's, user and system, a replica; RSS is its high-water mark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = (8, 128, 512, 1000)
WARM_RUNS = 5
WORKERS = 4
ROUTER = "sglang-router==0.3.2"
ROUTER_START_S = 300
ROUTER_FOLDER = ROOT / "build" / "bench" / "sglang-router"
COLUMNS = ("caller", "state", "replicas", "ok", "wall_ms", "p50_ms", "p99_ms", "skew_ms", "cpu_ms_per_call", "rss_mb")


def environment(*first: Path) -> dict[str, str]:
    """This process's, with the checkout importable, and before it the folders `first`."""
    path = os.pathsep.join([*map(str, first), str(ROOT), str(ROOT / "proto" / "gen"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.strip(os.pathsep)}


class Fleet:
    """Fakes in WORKERS processes."""

    def __init__(self, kind: str, size: int) -> None:
        shares = [size // WORKERS + (index < size % WORKERS) for index in range(WORKERS)]
        first = 0
        self.processes = []
        for share in shares:
            words = [sys.executable, "-m", "tests.bench.fake_fleet", kind, str(share), str(first)]
            self.processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            first += share
        self.targets: list[str] = []
        for process in self.processes:
            assert process.stdout is not None
            self.targets += json.loads(process.stdout.readline())

    def effects(self) -> list[int]:
        """Instants of the effects since the last time, ns."""
        found: list[int] = []
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("effects\n")
            process.stdin.flush()
            found += json.loads(process.stdout.readline())
        return found

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.terminate()
            process.wait(20)


@contextmanager
def fleet(kind: str, size: int) -> Iterator[Fleet]:
    made = Fleet(kind, size)
    try:
        yield made
    finally:
        made.close()


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """High-water mark of its resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def row(
    caller: str, state: str, made: Fleet, wall_s: float, took_ms: list[float], cpu: float, pid: int, ok: int
) -> dict[str, Any]:
    effects = sorted(made.effects())
    size = len(made.targets)
    sys.stderr.write(f"{caller} {state} {size}: {wall_s * 1e3:.0f} ms\n")
    return {
        "caller": caller,
        "state": state,
        "replicas": size,
        "ok": ok,
        "effects": len(effects),
        "wall_ms": wall_s * 1e3,
        "p50_ms": statistics.median(took_ms) if took_ms else None,
        "p99_ms": sorted(took_ms)[min(len(took_ms) - 1, int(len(took_ms) * 0.99))] if took_ms else None,
        "skew_ms": (effects[-1] - effects[0]) / 1e6 if effects else None,
        "cpu_ms_per_call": cpu / size * 1e3,
        "rss_mb": rss_mb(pid),
    }


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row in the middle by wall time."""
    return sorted(rows, key=lambda each: each["wall_ms"])[len(rows) // 2]


# --- the callers -------------------------------------------------------------------------------------------------


def spec() -> Any:
    from kvctl.v1 import fleet_pb2, types_pb2

    made = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True))
    made.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    made.timeout.seconds = 60
    return made


def bench_direct(made: Fleet) -> list[dict[str, Any]]:
    """kvctl's own fan-out, in a process of its own so that CPU and memory are its alone."""
    words = [sys.executable, "-m", "tests.bench.bench_fanout", "--as-direct"]
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(json.dumps(made.targets) + "\n")
        rows = []
        for state in ("cold", *["warm"] * WARM_RUNS):
            before = cpu_s(caller.pid)
            caller.stdin.write("go\n")
            caller.stdin.flush()
            answer = json.loads(caller.stdout.readline())
            cpu = cpu_s(caller.pid) - before
            rows.append(row("direct", state, made, answer["wall_s"], answer["took_ms"], cpu, caller.pid, answer["ok"]))
        caller.stdin.close()
        caller.wait(30)
    return [rows[0], median_of(rows[1:])]


async def as_direct() -> None:
    """The calling process of bench_direct."""
    from sidecar.coordinator.channels import Channels
    from sidecar.coordinator.discovery.sources import discovery_of
    from sidecar.coordinator.fanout import Run

    targets = json.loads(sys.stdin.readline())
    channels = Channels()
    discovery = discovery_of(targets)
    while sys.stdin.readline().strip() == "go":
        began = time.monotonic()
        ended = await Run(spec(), discovery, channels).run()
        wall_s = time.monotonic() - began
        took = [each.took.seconds * 1e3 + each.took.nanos / 1e6 for each in ended.results]
        print(json.dumps({"wall_s": wall_s, "took_ms": took, "ok": ended.counts.succeeded}), flush=True)
    await channels.close()


def bench_coordinator(made: Fleet) -> list[dict[str, Any]]:
    """Through kvctl-coordinator: start, and watch to the end."""
    with tempfile.TemporaryDirectory() as folder:
        inventory, ready = Path(folder, "fleet.yaml"), Path(folder, "ready.json")
        pairs = [target.partition("=") for target in made.targets]
        lines = [f"- {{name: {name}, address: '{address}'}}" for name, _, address in pairs]
        inventory.write_text("replicas:\n" + "\n".join(lines))
        words = [sys.executable, "-m", "sidecar.coordinator.main", "--inventory", str(inventory), "--metrics", "off"]
        words += ["--store", str(Path(folder, "ops.db")), "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        words += ["--audit-log", os.devnull, "--log-level", "error"]
        with subprocess.Popen(words, cwd=ROOT, env=environment()) as process:
            try:
                rows = _call_coordinator(made, process.pid, ready)
            finally:
                process.terminate()
                process.wait(30)
    return [rows[0], median_of(rows[1:])]


def _call_coordinator(made: Fleet, pid: int, ready: Path) -> list[dict[str, Any]]:
    import grpc
    from kvctl.v1 import fleet_pb2, fleet_pb2_grpc

    deadline = time.monotonic() + 30
    while not ready.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinator did not start")
        time.sleep(0.05)
    address = json.loads(ready.read_text())["listen"][0]
    rows = []
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 1 << 24)]) as channel:
        stub = fleet_pb2_grpc.FleetAdminStub(channel)
        stub.ListOperations(fleet_pb2.ListOperationsRequest(), wait_for_ready=True, timeout=30)
        for state in ("cold", *["warm"] * WARM_RUNS):
            before = cpu_s(pid)
            began = time.monotonic()
            started = stub.StartOperation(fleet_pb2.StartOperationRequest(spec=spec()), timeout=60).operation
            request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id)
            for _ in stub.WatchOperation(request, timeout=120):
                pass
            wall_s = time.monotonic() - began
            cpu = cpu_s(pid) - before
            asked = fleet_pb2.FleetAdminGetOperationRequest(operation_id=started.operation_id)
            ended = stub.GetOperation(asked, timeout=30).operation
            took = [each.took.seconds * 1e3 + each.took.nanos / 1e6 for each in ended.results]
            rows.append(row("coordinator", state, made, wall_s, took, cpu, pid, ended.counts.succeeded))
    return rows


def install_router() -> str:
    """Put the router where it is taken from; why that failed, empty when it is there."""
    if (ROUTER_FOLDER / "sglang_router").is_dir():
        return ""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    try:
        # What pip says about the packages of this environment means nothing: they do not meet.
        done = subprocess.run(
            [*words, "--target", str(ROUTER_FOLDER), ROUTER], capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        return "pip had not installed it after 600 s"
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return "" if done.returncode == 0 else f"pip could not install {ROUTER}: {last}"


def bench_router(made: Fleet) -> list[dict[str, Any]]:
    """sglang-router in front of HTTP fakes: its broadcast of /flush_cache."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--log-level", "error", "--prometheus-port", str(port + 1), "--policy", "round_robin"]
    words += ["--worker-startup-timeout-secs", "280", "--health-check-interval-secs", "5"]
    words += ["--health-success-threshold", "1", "--health-check-timeout-secs", "30", "--worker-urls", *made.targets]
    url = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, env=environment(ROUTER_FOLDER), **quiet) as process:
        try:
            _await_router(opener, url, process, len(made.targets))
            rows = []
            for _ in range(WARM_RUNS):
                before = cpu_s(process.pid)
                began = time.monotonic()
                request = urllib.request.Request(f"{url}/flush_cache", method="POST")
                with opener.open(request, timeout=120) as answer:
                    told = answer.read().decode("utf-8", "replace")
                    status = answer.status
                wall_s = time.monotonic() - began
                made_row = row("router", "warm", made, wall_s, [], cpu_s(process.pid) - before, process.pid, 0)
                made_row["ok"] = made_row["effects"]
                made_row["answer"] = f"{status} {told[:120]}"
                rows.append(made_row)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    return [median_of(rows)]


def _await_router(opener: Any, url: str, process: Any, size: int) -> None:
    deadline = time.monotonic() + ROUTER_START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with code {process.returncode}")
        try:
            with opener.open(f"{url}/workers", timeout=5) as answer:
                found = json.loads(answer.read())
            workers = found.get("workers", found.get("urls", []))
            if len(workers) >= size and all(each.get("is_healthy", True) for each in workers if isinstance(each, dict)):
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"the router had not found its workers after {ROUTER_START_S} s")


# --- output ------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [COLUMNS, *[tuple(cell(each[name]) for name in COLUMNS) for each in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--router", action="store_true", help=f"also {ROUTER}, installed into {ROUTER_FOLDER}")
    parser.add_argument("--as-direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_direct:
        asyncio.run(as_direct())
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    notes = [f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, descriptors {soft}/{hard}"]
    rows: list[dict[str, Any]] = []
    for size in (int(text) for text in options.sizes.split(",")):
        with fleet("grpc", size) as made:
            rows += bench_direct(made)
            rows += bench_coordinator(made)
        if not options.router:
            continue
        if missing := install_router():
            notes.append(f"no row for the router: {missing}")
            continue
        with fleet("http", size) as made:
            try:
                rows += bench_router(made)
            except (OSError, RuntimeError, TimeoutError) as error:
                notes.append(f"router with {size} workers: {type(error).__name__}: {error}")
    print(table(rows))
    print("\n".join(dict.fromkeys(notes)))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "notes": notes}, indent=1) + "\n")
    wrong = [each for each in rows if each["caller"] != "router" and each["ok"] != each["replicas"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
