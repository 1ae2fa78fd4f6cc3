"""A real `kvctl-sidecar` process and how a test talks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from kvctl.v1 import replica_pb2_grpc

from sidecar.rpc import addresses, channels
from sidecar.rpc.channels import ClientSecurity

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the checkout importable and no settings of ours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVCTL_")}
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(ROOT / "proto" / "gen")])
    return {**kept, "PYTHONPATH": path, **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sidecar.replica.main", *arguments]


def run_to_end(*arguments: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a sidecar that is expected to end by itself."""
    return subprocess.run(
        command(*arguments), env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )


class SidecarProcess:
    """Started and serving."""

    def __init__(self, engine_dir: Path, work_dir: Path, *arguments: str, **env: str) -> None:
        self.ready_file = work_dir / "ready.json"
        self.audit_file = work_dir / "audit.jsonl"
        self.log_file = work_dir / "sidecar.log"
        words = ["--engine-dir", os.fspath(engine_dir), "--ready-file", os.fspath(self.ready_file)]
        words += ["--audit-log", os.fspath(self.audit_file), "--name", "r0", "--log-level", "debug"]
        if "--listen" not in arguments:
            words += ["--listen", "127.0.0.1:0"]
        if "--metrics" not in arguments:
            words += ["--metrics", "127.0.0.1:0"]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                command(*words, *arguments), env=environment(**env), stderr=log, stdout=subprocess.PIPE, text=True
            )
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, 60)
        if self.process.poll() is not None:
            raise RuntimeError(f"the sidecar ended with {self.process.returncode}:\n{self.log_file.read_text()}")
        ready = json.loads(self.ready_file.read_text())
        self.address: str = ready["listen"][0]
        self.metrics: str = ready["metrics"]
        self.pid: int = ready["pid"]

    def channel(self, security: ClientSecurity = channels.NO_SECURITY) -> grpc.Channel:
        return channels.connect_blocking(addresses.parse(self.address), security)

    @contextmanager
    def stub(self) -> Iterator[replica_pb2_grpc.CacheAdminStub]:
        with self.channel() as channel:
            yield replica_pb2_grpc.CacheAdminStub(channel)

    @contextmanager
    def stub_over(self, security: ClientSecurity) -> Iterator[replica_pb2_grpc.CacheAdminStub]:
        with self.channel(security) as channel:
            yield replica_pb2_grpc.CacheAdminStub(channel)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_ready(self, timeout: float = 60) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, timeout, lambda: self.get("/readyz")[1])

    def audit(self) -> list[dict[str, object]]:
        if not self.audit_file.exists():
            return []
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]

    def log(self) -> str:
        return self.log_file.read_text()

    def terminate(self, timeout: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def wait_until(condition: object, timeout: float, explain: object = None) -> None:
    """Poll a condition; AssertionError with an explanation when it never holds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout} s: {explain() if explain else condition}")  # type: ignore[operator]
