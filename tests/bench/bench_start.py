"""What kvctl costs before it does anything: start of the command line and of the sidecar, memory and idling.

The command line is set against an empty Python, in turns. The sidecar watches two engines that do nothing (processes of
the tests' fake engine: the real socket, page and handshake, no model); its processor time is the kernel's own account
in nanoseconds, all threads together.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
from kvctl.v1 import replica_pb2, replica_pb2_grpc

from tests.bench.figures import Report, Table, main, progress
from tests.bench.pairs import take_turns
from tests.contract.sidecar_process import command, environment
from tests.fake_engine.process import spawn_engine

STARTED_BY = ("--help", "version")
BOUND_S = 60.0


def spent_running(words: list[str]) -> float:
    """Milliseconds on the clock from exec to the end."""
    began = time.perf_counter()
    subprocess.run(words, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=BOUND_S)
    return (time.perf_counter() - began) * 1000


def command_line(rounds: int, report: Report) -> None:
    script = Path(sys.executable).with_name("kvctl")
    kvctl = [str(script)] if script.exists() else [sys.executable, "-m", "sidecar.cli.main"]
    empty = [sys.executable, "-c", "pass"]
    others = {f"kvctl {word}": (lambda word=word: spent_running([*kvctl, word])) for word in STARTED_BY}
    spent_running(empty)
    for measure_once in others.values():
        measure_once()  # bytecode is written, files are in the page cache
    turns = take_turns(lambda: spent_running(empty), others, rounds)
    table = Table("Start of the command line, milliseconds (median)", ("command", "ms", "times python (quartiles)"))
    table.rows.append(["python -c pass", turns.median_baseline, f"noise {turns.noise().text}"])
    for name in others:
        ratio = turns.ratio(name)
        table.rows.append([name, turns.median(name), ratio.text])
        report.aim(
            f"{name} within 8 times an empty Python", ratio.median, 8, "times", "imports; see `python -X importtime`"
        )
    report.tables.append(table)


def started(directory: Path, work: Path) -> tuple[subprocess.Popen[bytes], float, float]:
    """A sidecar, and seconds from exec until it has bound its port, and until it has answered a call."""
    ready = work / "ready.json"
    ready.unlink(missing_ok=True)
    words = command("--engine-dir", str(directory), "--ready-file", str(ready), "--listen", "127.0.0.1:0")
    words += ["--metrics", "127.0.0.1:0", "--audit-log", str(work / "audit.jsonl"), "--log-level", "error"]
    began = time.perf_counter()
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    while not ready.exists():
        if process.poll() is not None or time.perf_counter() - began > BOUND_S:
            raise RuntimeError(f"the sidecar did not start (code {process.poll()})")
        time.sleep(0.001)
    serving = time.perf_counter() - began
    address = json.loads(ready.read_text())["listen"][0]
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = replica_pb2_grpc.CacheAdminStub(channel)
        answer = stub.GetReplica(replica_pb2.GetReplicaRequest(), timeout=BOUND_S, wait_for_ready=True)
        answered = time.perf_counter() - began
        until = time.perf_counter() + BOUND_S
        while len(answer.replica.engines) < 2 and time.perf_counter() < until:
            time.sleep(0.05)
            answer = stub.GetReplica(replica_pb2.GetReplicaRequest(), timeout=BOUND_S)
        if len(answer.replica.engines) < 2:
            raise RuntimeError(f"the sidecar sees {len(answer.replica.engines)} engines, expected 2")
    return process, serving, answered


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no VmRSS of process {pid}")


def processor_s(pid: int) -> float:
    """Time on a processor so far, all threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def sidecar(starts: int, idle_s: float, report: Report) -> None:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvctl-bench-")))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvctl-bench-")))
        for rank in range(2):
            stack.enter_context(spawn_engine(directory, "--rank", str(rank), "--dp-size", "2"))
        serving, answered, empty, resident, idle = [], [], [], [], []
        for index in range(starts + 1):
            empty.append(spent_running([sys.executable, "-c", "pass"]) / 1000)
            process, bound_s, answered_s = started(directory, work)
            try:
                if index < starts:
                    serving.append(bound_s)
                    answered.append(answered_s)
                    resident.append(resident_mb(process.pid))
                    continue
                time.sleep(2)  # what follows a start is over
                before, began = processor_s(process.pid), time.perf_counter()
                time.sleep(idle_s)
                idle.append((processor_s(process.pid) - before) / (time.perf_counter() - began) * 100)
                resident.append(resident_mb(process.pid))
            finally:
                process.terminate()
                process.wait(BOUND_S)
    began_s, base = statistics.median(serving), statistics.median(empty)
    rows: list[list[str | float | int | None]] = [
        ["exec to serving, s", began_s, f"{began_s / base:.1f} times python -c pass; {min(serving):.2f} at best"],
        ["exec to the first answered call, s", statistics.median(answered), "with the caller's connection"],
        ["resident memory with 2 engines watched, MB", resident[-1], f"{statistics.median(resident):.1f} just started"],
        ["processor time idle, 2 engines watched, % of a core", idle[0], f"over {idle_s:.0f} s"],
    ]
    report.tables.append(Table("The sidecar", ("figure", "value", "")))
    report.tables[-1].rows = rows
    why = f"an empty Python took {base * 1000:.0f} ms in this run; nearly all is importing grpc and protobuf"
    report.aim("sidecar from exec to serving under 0.7 s", began_s, 0.7, "s", why)
    report.aim("idle sidecar under 60 MB resident", resident[-1], 60, "MB", "Python, grpc and protobuf as imported")
    why = "its samples of each engine's page, and asyncio's wake-ups for them"
    report.aim("idle sidecar under 0.5% of a core, 2 engines", idle[0], 0.5, "%", why)


def measure(quick: bool) -> Report:
    report = Report("start")
    progress("start of the command line")
    command_line(5 if quick else 15, report)
    progress("the sidecar")
    sidecar(3 if quick else 9, 5 if quick else 30, report)
    return report


if __name__ == "__main__":
    os.environ.pop("KVCTL_ENGINE_DIR", None)
    sys.exit(main(measure))
