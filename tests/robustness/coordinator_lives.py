"""A small fleet of real sidecars over fake engines, and coordinators that live and die over one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import grpc
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2

from sidecar.coordinator.targets import derive_request_id, next_request_id
from sidecar.rpc import addresses, channels
from tests.contract.sidecar_process import ROOT, SidecarProcess, environment, wait_until
from tests.fake_engine.process import EngineProcess

ENDED = (4, 5, 6, 7)


class Fleet:
    """Replicas that outlive every coordinator. Counts the effects of each by request id."""

    def __init__(self, folder: Path, replicas: int = 2) -> None:
        self._stack = ExitStack()
        self.targets: list[str] = []
        self._effects: dict[str, Path] = {}
        self._own_names: dict[str, str] = {}
        """What a replica calls itself, by the name that the coordinator has for it."""
        for index in range(replicas):
            name = f"r{index}"
            work = folder / name
            (work / "e").mkdir(parents=True)
            self._effects[name] = work / "effects.jsonl"
            engine = EngineProcess(work / "e", "--effects", str(self._effects[name]))
            self._stack.callback(engine.end)
            self._own_names[name] = f"own-{name}"
            sidecar = SidecarProcess(work / "e", work, "--name", f"own-{name}", "--log-level", "warning")
            self._stack.callback(sidecar.end)
            sidecar.wait_ready(60)
            self.targets += ["--targets", f"{name}={sidecar.address}"]

    def effects(self, operation_id: str) -> dict[str, int]:
        """Replica -> how often its engine was changed by this operation, whatever the request id."""
        counted = {}
        for name, file in self._effects.items():
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            ours = [derive_request_id(operation_id, self._own_names[name])]
            for _ in range(10):
                ours.append(next_request_id(ours[-1]))
            counted[name] = sum(line["request_id"] in ours and line["effect"] == "reset" for line in lines)
        return counted

    def total_effects(self) -> int:
        """Every effect at any replica: nothing may come from anywhere else either."""
        return sum(len(file.read_text().splitlines()) for file in self._effects.values() if file.exists())

    def close(self) -> None:
        self._stack.close()


class Zygote:
    """See coordinator_zygote.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.coordinator_zygote"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **command: object) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the zygote has ended"
        answer: dict[str, int] = json.loads(line)
        return answer

    def start(self, arguments: list[str], die_at: str = "", nth: int = 1) -> int:
        log = str(self._folder / "coordinator.log")
        return self._ask(do="start", arguments=arguments, die_at=die_at, nth=nth, log=log)["pid"]

    def wait(self, pid: int) -> int:
        return self._ask(do="wait", pid=pid)["code"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Coordinator:
    """One life."""

    def __init__(self, zygote: Zygote, fleet: Fleet, store: Path, die_at: str = "", nth: int = 1) -> None:
        self._zygote = zygote
        ready = store.parent / f"ready-{uuid.uuid4().hex[:8]}.json"
        self.started = time.monotonic()
        arguments = ["--store", str(store), "--listen", "127.0.0.1:0", "--metrics", "off", "--ready-file", str(ready)]
        arguments += ["--audit-log", os.devnull]
        self.pid = zygote.start([*fleet.targets, *arguments], die_at, nth)
        # An unfinished operation may kill it before it is ready; then there is nothing to call.
        wait_until(lambda: ready.exists() or not _alive(self.pid), 60)
        self.address = json.loads(ready.read_text())["listen"][0] if ready.exists() else ""
        self.channel = channels.connect_blocking(addresses.parse(self.address or "127.0.0.1:1"))
        self.stub = fleet_pb2_grpc.FleetAdminStub(self.channel)

    def start_reset(self, operation_id: str, **rollout: object) -> None:
        """Start; the answer may be lost to the crash."""
        spec = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True), rollout=fleet_pb2.Rollout(**rollout))  # type: ignore[arg-type]
        spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
        spec.timeout.seconds = 60
        request = fleet_pb2.StartOperationRequest(operation_id=operation_id, spec=spec)
        try:
            self.stub.StartOperation(request, timeout=60)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise

    def ended(self, operation_id: str, timeout: float = 60) -> fleet_pb2.FleetOperation:
        """The operation once it has ended."""
        request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=operation_id)
        found: list[fleet_pb2.FleetOperation] = []

        def look() -> bool:
            found[:] = [self.stub.GetOperation(request, timeout=30).operation]
            return found[0].state in ENDED

        wait_until(look, timeout, lambda: found)
        return found[0]

    def died(self) -> int:
        """Wait for its end; the exit code, -9 after a SIGKILL."""
        self.channel.close()
        return self._zygote.wait(self.pid)

    def kill(self) -> None:
        os.kill(self.pid, 9)
        self.died()

    def terminate(self) -> int:
        os.kill(self.pid, 15)
        return self.died()


def _alive(pid: int) -> bool:
    """A zombie is dead; the zygote reaps it later."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
