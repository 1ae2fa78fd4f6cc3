"""The examples that reset after a weight update are whole: their kinds take them, and they do what they say."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fake_sidecar_server import FakeSidecar, refused, serving
from foreign_kinds import problems

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / "deploy/hooks"

Manifest = dict[str, Any]


def hook(name: str, kind: str) -> Manifest:
    found: list[Manifest] = [one for one in yaml.safe_load_all((HOOKS / name).read_text()) if one["kind"] == kind]
    (manifest,) = found
    return manifest


EXAMPLES = [("rayjob.yaml", "RayJob"), ("argo-workflow.yaml", "Workflow")]


@pytest.mark.parametrize(("name", "kind"), EXAMPLES)
def test_the_kind_of_an_example_takes_it(name: str, kind: str) -> None:
    assert problems(hook(name, kind)) == []


@pytest.mark.parametrize(
    ("name", "kind", "misspelt"),
    [
        ("rayjob.yaml", "RayJob", ("spec", "shutdownAfterJobFinish")),
        ("rayjob.yaml", "RayJob", ("spec", "rayClusterSpec", "headGroupSpec", "rayStartParam")),
        ("argo-workflow.yaml", "Workflow", ("spec", "template")),
    ],
)
def test_a_field_that_its_kind_does_not_know_would_be_caught(name: str, kind: str, misspelt: tuple[str, ...]) -> None:
    manifest = copy.deepcopy(hook(name, kind))
    inner = manifest
    for part in misspelt[:-1]:
        inner = inner[part]
    inner[misspelt[-1]] = {}
    assert problems(manifest)


def test_the_workflow_runs_as_an_account_that_may_make_and_watch_the_cacheoperation() -> None:
    workflow, account = hook("argo-workflow.yaml", "Workflow"), hook("argo-workflow.yaml", "ServiceAccount")
    role, binding = hook("argo-workflow.yaml", "Role"), hook("argo-workflow.yaml", "RoleBinding")
    for manifest in (account, role, binding):
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert workflow["spec"]["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    rights = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert rights["cacheoperations"] == {"create", "get"}


def test_the_driver_is_where_the_ray_job_starts_it() -> None:
    driver, job = hook("rayjob.yaml", "ConfigMap"), hook("rayjob.yaml", "RayJob")
    kubernetes_validate.validate(driver, "1.37", strict=True)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (head,) = pod["containers"]
    (volume,) = [one["name"] for one in pod["volumes"] if one.get("configMap", {}).get("name") == "grpo-driver"]
    (folder,) = [one["mountPath"] for one in head["volumeMounts"] if one["name"] == volume]
    (script,) = driver["data"]
    assert job["spec"]["entrypoint"] == f"python {folder}/{script}"


async def drive(folder: Path, addresses: list[str]) -> tuple[int, str]:
    """Run the driver of the Ray job for two steps beside a trainer that says what it was asked."""
    (folder / "train.py").write_text(hook("rayjob.yaml", "ConfigMap")["data"]["train.py"])
    (folder / "trainer.py").write_text(
        "def train(step):\n    print('train', step)\n\n"
        "def push_weights(sidecars):\n    print('push', ' '.join(sorted(sidecars)))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "train.py",
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if name != "FLEET_TLS"},
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto/gen'}",
            "FLEET": " ".join(addresses),
            "STEPS": "2",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 90)
    return process.returncode or 0, f"{out.decode()}{errors.decode()}"


async def test_the_driver_of_the_ray_job_updates_every_replica_after_each_step(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    async with serving(*fakes) as addresses:
        code, told = await drive(tmp_path, addresses)
    assert code == 0, told
    assert told.splitlines() == ["train 1", "push r0 r1", "train 2", "push r0 r1"]
    for fake in fakes:
        kinds = [type(request).__name__ for request in fake.requests]
        assert kinds == ["PauseSchedulingRequest", "ResetPrefixCacheRequest", "ResumeSchedulingRequest"] * 2
        assert fake.requests[-1].weight_version == "step-2"  # type: ignore[attr-defined]


async def test_the_driver_ends_with_an_error_when_a_replica_is_lost(tmp_path: Path) -> None:
    lost = FakeSidecar("r1")
    lost.fail_with = [refused()]
    async with serving(FakeSidecar("r0"), lost) as addresses:
        code, told = await drive(tmp_path, addresses)
    assert code != 0
    assert "train 2" not in told
    assert "r1" in told


WHOLE = {"running_requests": "Keep", "quarantine": True, "connector": True, "encoder": True}


def test_every_example_resets_all_tiers_that_depend_on_the_weights() -> None:
    (job,) = hook("job.yaml", "Job")["spec"]["template"]["spec"]["containers"]
    words = set(job["args"])
    asked = {"running_requests": "Keep" if "--mode=keep" in words else ""}
    asked |= {name: f"--{name}" in words for name in ("quarantine", "connector", "encoder")}
    assert asked == WHOLE
    templates = hook("argo-workflow.yaml", "Workflow")["spec"]["templates"]
    manifest = next(one["resource"]["manifest"] for one in templates if "resource" in one)
    for operation in (yaml.safe_load(manifest), hook("cacheoperation.yaml", "CacheOperation")):
        reset = operation["spec"]["reset"]
        names = ("runningRequests", "quarantineRunning", "resetConnector", "resetEncoderCache")
        assert [reset[name] for name in names] == list(WHOLE.values())
