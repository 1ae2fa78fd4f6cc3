"""A real `kvctl-coordinator` process and how a test talks to it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvctl.v1 import fleet_pb2, fleet_pb2_grpc

from sidecar.rpc import addresses, channels
from tests.contract.sidecar_process import environment, wait_until

WORDS = [sys.executable, "-m", "sidecar.coordinator.main"]


class CoordinatorProcess:
    def __init__(self, folder: Path, targets: list[str], *arguments: str, under: Sequence[str] = ()) -> None:
        """`under`: words of a program that runs it."""
        self.ready = folder / f"ready-{uuid.uuid4().hex[:8]}.json"
        self.log_file = folder / "coordinator.log"
        words = [word for target in targets for word in ("--targets", target)]
        words += ["--store", str(folder / "ops.db"), "--ready-file", str(self.ready), "--metrics", "off"]
        if "--listen" not in arguments:
            words += ["--listen", "127.0.0.1:0"]
        with self.log_file.open("a") as log:
            self.process = subprocess.Popen(
                [*under, *WORDS, *words, *arguments], env=environment(), stderr=log, stdout=log
            )

    def serve(self) -> fleet_pb2_grpc.FleetAdminStub:
        wait_until(lambda: self.ready.exists() or self.process.poll() is not None, 60, self.log)
        assert self.ready.exists(), self.log()
        self.address = json.loads(self.ready.read_text())["listen"][0]
        self.channel = channels.connect_blocking(addresses.parse(self.address))
        return fleet_pb2_grpc.FleetAdminStub(self.channel)

    def log(self) -> str:
        return self.log_file.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


def get(stub: fleet_pb2_grpc.FleetAdminStub, operation_id: str) -> fleet_pb2.FleetOperation:
    request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=operation_id)
    return stub.GetOperation(request, timeout=30).operation
