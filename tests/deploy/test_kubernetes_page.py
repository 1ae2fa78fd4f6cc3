"""docs/kubernetes.md, and the Kubernetes part of docs/install.md, command by command with the real kubectl.

The cluster is an API server, an operator with the arguments of its own Deployment, and this test as the controllers
that a cluster has besides: it makes the pods of the Deployment `vllm`, with fake sidecars in them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pages
import pytest
import yaml
from apiserver import ApiServer
from apiserver import serving as api_serving
from cluster import FINAL, kubeconfig_for, pod
from fake_sidecar_server import FakeSidecar, serving
from pages import DEVELOPMENT, INSTALL, KUBERNETES, ROOT
from programs import program

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator.app import Operator

NAMESPACE = "kvctl-demo"


def test_every_command_of_the_pages_is_walked_or_named_with_the_reason_why_not() -> None:
    on_pages = {*pages.commands(INSTALL), *pages.commands(KUBERNETES)}
    walked = {*pages.HOST, *pages.INSTALLING, *pages.CLUSTER, pages.TAKING_OUT}
    assert on_pages - walked - set(pages.NOT_WALKED) == set()
    assert {*walked, *pages.NOT_WALKED} - on_pages == set(), "what is not on the pages any more"
    assert walked & set(pages.NOT_WALKED) == set()
    assert len(pages.CLUSTER) > 15


def test_every_path_and_page_that_the_kubernetes_page_names_exists() -> None:
    text = KUBERNETES.read_text()
    for path in re.findall(r"\b(deploy/[\w./-]+)", text):
        assert (ROOT / path.rstrip("./")).exists(), path
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (KUBERNETES.parent / link).exists(), link


class Walk:
    """kubectl in a folder that has what the page says, and the server that it talks to."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api, self.folder = api, folder
        (folder / "deploy").symlink_to(ROOT / "deploy")
        (folder / "wipe.yaml").write_text(pages.file_block(KUBERNETES, "# wipe.yaml"))
        (folder / "kubeconfig").write_text(kubeconfig_for(api.url))

    async def __call__(self, line: str) -> str:
        name, *words = shlex.split(line)
        # The emulated server has no OpenAPI in protobuf, which is what kubectl validates with before it sends.
        unchecked = ["--validate=false"] if {"create", "apply"} & set(words[:3]) and "can-i" not in words else []
        process = await asyncio.create_subprocess_exec(
            program(name),
            *words,
            *unchecked,
            cwd=self.folder,
            env={**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode == 0, f"{line}\n{out.decode()}"
        return out.decode()


@asynccontextmanager
async def operator_of_the_deployment(api: ApiServer) -> AsyncIterator[None]:
    """With the words of the manifest; only its port for metrics is not taken."""
    deployment = api.get("deployments", "kvctl-operator", NAMESPACE)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    known = {"$(POD_NAME)": "kvctl-operator-0", "$(POD_NAMESPACE)": NAMESPACE}
    words = [re.sub(r"\$\(\w+\)", lambda found: known[found[0]], word) for word in container["args"]]
    assert words[0] == "--operator"
    config = operator_config.load([*words[1:], "--metrics=off"], {})
    operator = Operator(config, Access(api.url, NAMESPACE))
    task = asyncio.create_task(operator.serve())
    try:
        yield
    finally:
        operator.stop()
        await asyncio.wait_for(task, 30)


@pytest.mark.timeout(600)
async def test_the_pages_are_walked_from_apply_to_delete(tmp_path: Path) -> None:
    fakes = [FakeSidecar("vllm-0"), FakeSidecar("vllm-1")]
    seen: dict[str, str] = {}
    async with serving(*fakes) as addresses, api_serving() as api:
        walk = Walk(api, tmp_path)
        steps = iter(pages.INSTALLING)

        async def up_to(last: str) -> None:
            for line in steps:
                seen[line] = await walk(line)
                if line == last:
                    return

        await up_to(f"kubectl apply -k {DEVELOPMENT}")
        labels = api.get("deployments", "vllm", NAMESPACE)["spec"]["template"]["metadata"]["labels"]
        for fake, address in zip(fakes, addresses, strict=True):
            made = pod(fake.name, address, namespace=NAMESPACE)
            made["metadata"]["labels"] = labels
            await api.put("pods", made)
        async with operator_of_the_deployment(api):
            await up_to(pages.INSTALLING[-1])
            await api.until(lambda: ended(api))
            for line in pages.CLUSTER:
                if line.startswith("kubectl label namespace monitoring"):
                    await api.create("namespaces", {"metadata": {"name": "monitoring"}})
                if "describe cop wipe" in line:
                    await api.until(lambda: "Succeeded" in reasons(api, "wipe"))
                seen[line] = await walk(line)
                if "annotate pods" in line:
                    # The next command shows the annotations that the operator writes when it is done.
                    await api.until(lambda: all(done(api, fake.name) == "step-4200" for fake in fakes))
        seen[pages.TAKING_OUT] = await walk(pages.TAKING_OUT)
        left = [key for key in api.objects if key[1] == NAMESPACE and key[0] in ("deployments", "roles", "services")]
    assert left == []
    check_what_was_shown(seen)
    # The fleet reset of the installation page, `wipe`, the one by the hook, and one a pod by the annotation.
    assert [len(fake.effects) for fake in fakes] == [4, 4]


def ended(api: ApiServer) -> bool:
    operations = [body for (plural, _, _), body in api.objects.items() if plural == "cacheoperations"]
    return all(body.get("status", {}).get("phase") in FINAL for body in operations)


def reasons(api: ApiServer, name: str) -> list[str]:
    events = [body for (plural, _, _), body in api.objects.items() if plural == "events"]
    return [event["reason"] for event in events if event["involvedObject"]["name"] == name]


def done(api: ApiServer, name: str) -> str | None:
    annotations = api.get("pods", name, NAMESPACE)["metadata"].get("annotations") or {}
    value: str | None = annotations.get("kvctl.dev/reset-done")
    return value


def check_what_was_shown(seen: dict[str, str]) -> None:
    """What the page says that one sees."""
    head = seen["kubectl -n kvctl-demo get cacheoperations"].splitlines()[0]
    shown = pages.file_block(KUBERNETES, "NAME   OPERATION")
    assert head.split() == shown.splitlines()[0].split()
    wide = seen["kubectl -n kvctl-demo get cop wipe -o wide"]
    assert "all 2 targets succeeded" in wide
    assert wide.splitlines()[1].split()[:6] == shown.splitlines()[1].split()[:6]
    described = seen["kubectl -n kvctl-demo describe cop wipe"]
    assert "Cached Blocks Dropped" in described
    assert re.search(r"Normal +Succeeded", described)
    assert "quarantineRunning" in seen["kubectl explain cacheoperation.spec --recursive"]
    rendered = [one for one in yaml.safe_load_all(seen[f"kubectl kustomize {DEVELOPMENT}"]) if one]
    assert len(rendered) > 10
    (columns,) = [out for line, out in seen.items() if "custom-columns" in line]
    assert columns.split()[-3:] == ["vllm-1", "step-4200", "step-4200"]
