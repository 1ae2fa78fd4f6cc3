"""The processes of a recorded fleet, each of which can be killed, stopped, and started again in its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc, replica_pb2, replica_pb2_grpc, types_pb2

from sidecar.coordinator import outcomes
from sidecar.rpc import addresses, channels
from sidecar.rpc.channels import ClientSecurity
from tests.contract.sidecar_process import ROOT, environment, wait_until
from tests.fake_engine.process import EngineProcess
from tests.robustness.tcp_proxy import Network, TcpProxy

START_S = 60.0
OnFault = Callable[[str, str], None]
"""Told what is done to whom."""


class ServerProcess:
    """A sidecar or a coordinator: started when its ready file is there."""

    def __init__(self, module: str, folder: Path, arguments: Sequence[str], wrapper: Sequence[str] = ()) -> None:
        """`wrapper` is a module of ours with its arguments, which runs the server's module: see `stepped_clock`."""
        self.log_file = folder / f"{module.rpartition('.')[0]}.log"
        ready = folder / f"ready-{uuid.uuid4().hex[:8]}.json"
        words = [sys.executable, "-m", *wrapper, module, *arguments, "--ready-file", str(ready)]
        with self.log_file.open("a") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: ready.exists() or self.process.poll() is not None, START_S, self.log)
        if not ready.exists():
            raise AssertionError(f"{module} ended with {self.process.returncode}:\n{self.log()}")
        found = json.loads(ready.read_text())
        self.address: str = found["listen"][0]
        self.stopped = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.stopped = True
        wait_until(lambda: stopped(self.process.pid), START_S)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
        self.stopped = False

    def log(self) -> str:
        return self.log_file.read_text()


def stopped(pid: int) -> bool:
    """Whether all of a process stands still."""
    try:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(state == "T" for state in states)


class ReplicaUnderTest:
    """An engine, the sidecar beside it, and the proxy before that."""

    def __init__(self, folder: Path, name: str, network: Network, on_fault: OnFault, security: ClientSecurity) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.audit_file = self.folder / "audit.jsonl"
        self.tape_file = self.folder / "engine.jsonl"
        self.proxy = network.proxy()
        self.engine: EngineProcess
        self.sidecar: ServerProcess
        self._engines = 0
        self._engine_dir = self.folder / "e0"
        self._engine_stopped = False
        self._on_fault = on_fault
        self._security = security

    # --- lives ---------------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        self._engine_dir.mkdir(exist_ok=True)
        history = ["--replica", self.name, "--history", str(self.tape_file), "--audit", str(self.audit_file)]
        self.engine = EngineProcess(self._engine_dir, *history)
        self._on_fault("start", f"{self.name} engine")

    def start_sidecar(self, *arguments: str, wrapper: Sequence[str] = ()) -> None:
        words = ["--name", self.name, "--engine-dir", str(self._engine_dir), "--audit-log", str(self.audit_file)]
        words += ["--listen", "127.0.0.1:0", "--metrics", "off", "--log-level", "warning", *arguments]
        self.sidecar = ServerProcess("sidecar.replica.main", self.folder, words, wrapper)
        self.proxy.upstream = self.sidecar.address
        wait_until(self._engine_connected, START_S, self.sidecar.log)
        self._on_fault("start", f"{self.name} sidecar")

    def kill_engine(self) -> None:
        self._on_fault("kill", f"{self.name} engine")
        self.engine.kill()
        self._engine_stopped = False

    def kill_sidecar(self) -> None:
        self._on_fault("kill", f"{self.name} sidecar")
        self.sidecar.kill()

    def stop_engine(self) -> None:
        if self.engine.process.poll() is not None:
            return
        self._on_fault("stop", f"{self.name} engine")
        self.engine.freeze()
        self._engine_stopped = True
        wait_until(lambda: stopped(self.engine.pid), START_S)

    def stop_sidecar(self) -> None:
        if not self.sidecar.alive:
            return
        self._on_fault("stop", f"{self.name} sidecar")
        self.sidecar.stop()

    def continue_engine(self) -> None:
        self.engine.thaw()
        self._engine_stopped = False
        self._on_fault("continue", f"{self.name} engine")

    def continue_sidecar(self) -> None:
        self.sidecar.go_on()
        self._on_fault("continue", f"{self.name} sidecar")

    def wait_held(self, seconds: float) -> bool:
        """Whether the engine comes to the point where it is to be held."""
        try:
            self.engine.do("wait_held", seconds=seconds)
        except RuntimeError:
            return False
        return True

    def let_go(self) -> None:
        """Whatever holds the engine does so no more; one that is stopped or dead hears it when it is mended."""
        if self.engine.process.poll() is None and not self._engine_stopped:
            self.engine.do("let_go")

    def replace(self) -> None:
        """Another replica under the same name and address: engine, sidecar and directory are new."""
        self._on_fault("replace", self.name)
        self.sidecar.kill()
        self.engine.kill()
        self._engine_stopped = False
        self._engines += 1
        self._engine_dir = self.folder / f"e{self._engines}"
        self.start_engine()
        self.start_sidecar()

    def break_network(self, what: str, how: Callable[[TcpProxy], None]) -> None:
        """Do something to the way between the coordinator and this replica."""
        self._on_fault(what, f"{self.name} network")
        how(self.proxy)

    def mend(self) -> None:
        """Alive, awake and reachable."""
        self.proxy.mend()
        if self._engine_stopped:
            self.continue_engine()
        if self.engine.process.poll() is not None:
            self.start_engine()
        self.let_go()
        if not self.sidecar.alive:
            self.start_sidecar()
        elif self.sidecar.stopped:
            self.continue_sidecar()
        wait_until(self._engine_connected, START_S, self.sidecar.log)

    def end(self) -> None:
        for part in (getattr(self, "sidecar", None), getattr(self, "engine", None)):
            if isinstance(part, ServerProcess):
                part.kill()
            elif isinstance(part, EngineProcess):
                part.kill()
                part.end()

    # --- past the proxy ------------------------------------------------------------------------------------------

    def ask(self, row: fleet_pb2.TargetResult, incarnation: str) -> fleet_pb2.TargetResult:
        """What the sidecar knows of a request whose answer was lost, and which an engine of this incarnation may have
        run. It must be well, and so must its engine.
        """
        answers: list[fleet_pb2.TargetResult] = []

        def settled() -> bool:
            record = self._record(row.request_id)
            if record is None:
                answers[:] = [row if incarnation != self.engine.incarnation else _never_executed()]
            elif (known := outcomes.of_record(record)) is not None:
                answers[:] = [known]
            return bool(answers)

        wait_until(settled, START_S, self.sidecar.log)
        answers[0].replica, answers[0].request_id = row.replica, row.request_id
        return answers[0]

    def _record(self, request_id: str) -> replica_pb2.GetOperationResponse | None:
        """None when it does not know the id."""
        with channels.connect_blocking(addresses.parse(self.sidecar.address), self._security) as channel:
            stub = replica_pb2_grpc.CacheAdminStub(channel)
            try:
                return stub.GetOperation(replica_pb2.GetOperationRequest(request_id=request_id), timeout=START_S)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                return None

    def _engine_connected(self) -> bool:
        with channels.connect_blocking(addresses.parse(self.sidecar.address), self._security) as channel:
            stub = replica_pb2_grpc.CacheAdminStub(channel)
            found = stub.GetReplica(replica_pb2.GetReplicaRequest(), timeout=START_S).replica
        return any(
            engine.connected and engine.engine.incarnation == self.engine.incarnation for engine in found.engines
        )


def _never_executed() -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(
        outcome=fleet_pb2.TARGET_OUTCOME_FAILED,
        code="DEADLINE_EXCEEDED",
        reason="NOT_EXECUTED",
        execution=types_pb2.EXECUTION_NOT_EXECUTED,
    )


class CoordinatorUnderTest:
    """One store, one coordinator at a time."""

    def __init__(self, folder: Path, targets: Sequence[str], on_fault: OnFault) -> None:
        self.store = folder / "ops.db"
        self._folder = folder
        self._words = [word for target in targets for word in ("--targets", target)]
        self._words += ["--store", str(self.store), "--listen", "127.0.0.1:0", "--metrics", "off"]
        self._on_fault = on_fault
        self._channel: grpc.Channel | None = None
        self.process: ServerProcess
        self.stub: fleet_pb2_grpc.FleetAdminStub

    def start(self, *arguments: str, wrapper: Sequence[str] = ()) -> None:
        words = [*self._words, "--log-level", "warning", *arguments]
        self.process = ServerProcess("sidecar.coordinator.main", self._folder, words, wrapper)
        self._close_channel()
        self._channel = channels.connect_blocking(addresses.parse(self.process.address))
        self.stub = fleet_pb2_grpc.FleetAdminStub(self._channel)
        self._on_fault("start", "coordinator")

    def kill(self) -> None:
        self._on_fault("kill", "coordinator")
        self.process.kill()

    def terminate(self) -> None:
        """SIGTERM, and wait for its clean end."""
        self._on_fault("terminate", "coordinator")
        self.process.process.terminate()
        self.process.process.wait(START_S)

    def stop(self) -> None:
        if not self.process.alive:
            return
        self._on_fault("stop", "coordinator")
        self.process.stop()

    def go_on(self) -> None:
        self.process.go_on()
        self._on_fault("continue", "coordinator")

    def mend(self) -> None:
        if not self.process.alive:
            self.start()
        elif self.process.stopped:
            self.go_on()

    def log(self) -> str:
        return self.process.log()

    def end(self) -> None:
        self._close_channel()
        if hasattr(self, "process"):
            self.process.kill()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
