"""A cluster for tests: an API server, pods with fake sidecars behind them, and operators that can be killed."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from apiserver import ApiServer

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator.app import Operator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/contract"))
from fake_sidecar_server import FakeSidecar  # noqa: E402

Spec = dict[str, Any]
KEEP: Spec = {"reset": {"runningRequests": "Keep"}, "targets": {"all": True}}
ROLLING: Spec = {**KEEP, "rollout": {"strategy": "Rolling", "maxUnavailable": 1}}
FINAL = {"Succeeded", "Partial", "Failed", "Cancelled", "Skipped"}


def pod(name: str, address: str, *, ready: bool = True, **meta: Any) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {
        "metadata": {"name": name, "labels": {"kvctl.dev/sidecar": "true"}, **meta},
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "kvctl", "containerPort": int(port)}]}]},
        "status": {
            "phase": "Running",
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class Cluster:
    """An API server, pods with fake sidecars behind them, and operators that can be killed."""

    def __init__(self, api: ApiServer, fakes: list[FakeSidecar], addresses: list[str]) -> None:
        self.api, self.fakes, self.addresses = api, fakes, addresses

    async def apply(self, name: str, spec: Spec) -> None:
        body = {"apiVersion": "kvctl.dev/v1alpha1", "kind": "CacheOperation", "metadata": {"name": name}, "spec": spec}
        await self.api.create("cacheoperations", body)

    def status(self, name: str) -> dict[str, Any]:
        body = self.api.objects.get(("cacheoperations", "llm", name), {})
        status: dict[str, Any] = body.get("status", {})
        return status

    async def finished(self, name: str, timeout: float = 40) -> dict[str, Any]:
        await self.api.until(lambda: self.status(name).get("phase") in FINAL, timeout)
        return self.status(name)

    def effects(self) -> list[int]:
        return [len(fake.effects) for fake in self.fakes]

    async def told(self, reason: str) -> None:
        """Wait for an event on a CacheOperation: it is posted after the status that it is about."""
        await self.api.until(lambda: reason in self.reasons())

    def reasons(self) -> list[str]:
        return [body["reason"] for (plural, _, _), body in self.api.objects.items() if plural == "events"]

    @asynccontextmanager
    async def operator(self, *arguments: str) -> AsyncIterator[Operator]:
        """One in this process, ended cleanly."""
        words = ["--metrics", "off", "--identity", "test", *arguments]
        operator = Operator(operator_config.load(words, {}), Access(self.api.url, "llm"))
        task = asyncio.create_task(operator.serve())
        try:
            yield operator
        finally:
            operator.stop()
            await asyncio.wait_for(task, 30)

    @asynccontextmanager
    async def process(self, tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
        """One in a process of its own, which a test may kill."""
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(kubeconfig_for(self.api.url))
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto/gen'}"}
        with (tmp_path / f"operator-{uuid.uuid4().hex[:6]}.log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sidecar.operator.main",
                "--operator",
                "--metrics=off",
                "--lease-duration=3s",  # what a test that kills one waits for; a busy machine still renews in time
                env=environment,
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 30)
                except TimeoutError:
                    process.kill()
                    await process.wait()
                    raise


def kubeconfig_for(url: str) -> str:
    return f"""
apiVersion: v1
kind: Config
current-context: t
contexts: [{{name: t, context: {{cluster: t, user: t, namespace: llm}}}}]
clusters: [{{name: t, cluster: {{server: '{url}'}}}}]
users: [{{name: t, user: {{}}}}]
"""


def gate(
    cluster: Cluster, number: int, which: Callable[[Any], bool] = lambda _: True
) -> tuple[asyncio.Event, asyncio.Event]:
    """(reached, open): the reset of one pod waits in the middle of its call, when its request is `which`."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait(kind: str) -> None:
        if kind == "reset" and which(cluster.fakes[number].requests[-1]):
            reached.set()
            await go.wait()

    cluster.fakes[number].before = wait
    return reached, go
