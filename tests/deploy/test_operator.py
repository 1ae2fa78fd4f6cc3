"""CacheOperations run against fake sidecars, through an API server: what a user sees, and what each pod gets."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import KEEP, ROOT, Cluster, kubeconfig_for, pod
from fake_sidecar_server import refused
from programs import program

# --- what a user sees ------------------------------------------------------------------------------------------------


async def test_an_applied_operation_resets_every_pod_once_and_tells_the_story(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        status = await cluster.finished("wipe")
        await cluster.told("Succeeded")
    assert status["phase"] == "Succeeded"
    assert status["progress"] == "4/4"
    assert status["counts"]["succeeded"] == 4
    assert status["operation"] == "Reset Keep"
    assert [row["replica"] for row in status["results"]] == ["p0", "p1", "p2", "p3"]
    assert all(row["cachedBlocksDropped"] == 812 for row in status["results"])
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Complete": "True",
        "Succeeded": "True",
        "TargetsComplete": "True",
    }
    assert status["observedGeneration"] == 1
    assert cluster.effects() == [1, 1, 1, 1]
    assert cluster.reasons() == ["Started", "Succeeded"]


async def test_request_ids_derive_from_the_resource_s_uid_the_step_and_the_pod_s_uid(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        await cluster.finished("wipe")
    operation = uuid.uuid5(uuid.UUID(cluster.api.get("cacheoperations", "wipe")["metadata"]["uid"]), "reset")
    for fake in cluster.fakes:
        pod_uid = cluster.api.get("pods", fake.name)["metadata"]["uid"]
        assert fake.effects == [str(uuid.uuid5(operation, pod_uid))]


async def test_the_intent_is_in_the_status_before_the_call(cluster: Cluster) -> None:
    recorded: list[bool] = []
    for fake in cluster.fakes:

        async def look(kind: str, name: str = fake.name) -> None:
            recorded.append(bool(cluster.status("wipe")["ledger"][name].get("requestId")))

        fake.before = look
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        await cluster.finished("wipe")
    assert recorded == [True] * 4


async def test_a_pod_that_is_not_ready_is_shown_and_the_operation_is_not_a_success(cluster: Cluster) -> None:
    await cluster.api.put("pods", pod("p3", cluster.addresses[3], ready=False))
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        status = await cluster.finished("wipe")
    assert status["phase"] == "Partial"
    assert status["results"][0]["replica"] == "p3"
    assert status["results"][0]["outcome"] == "Skipped"
    assert "not ready" in status["results"][0]["message"]
    assert "3 of 4 targets succeeded; p3" in status["message"]
    assert cluster.effects() == [1, 1, 1, 0]


async def test_a_refusal_is_shown_with_its_reason(cluster: Cluster) -> None:
    cluster.fakes[2].fail_with = [refused()]
    async with cluster.operator():
        await cluster.apply("wipe", {"reset": {}, "targets": {"all": True}})
        status = await cluster.finished("wipe")
        await cluster.told("Partial")
    assert status["phase"] == "Partial"
    assert status["results"][0]["code"] == "FAILED_PRECONDITION"
    assert status["results"][0]["reason"] == "BLOCKS_HELD_BY_REQUESTS"
    assert "12 blocks are held" in status["message"]
    assert cluster.reasons() == ["Started", "Partial"]


async def test_a_pod_that_answers_nothing_costs_its_own_row_a_timeout_and_delays_nobody(cluster: Cluster) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()  # connections are made by the kernel, and nobody ever says a word
        await cluster.api.put("pods", pod("p3", f"127.0.0.1:{hole.getsockname()[1]}"))
        async with cluster.operator():
            await cluster.apply("wipe", {**KEEP, "timeoutSeconds": 10})
            await cluster.api.until(lambda: cluster.status("wipe").get("counts", {}).get("succeeded") == 3)
            assert cluster.status("wipe")["phase"] == "Running", "three have ended while the fourth still waits"
            status = await cluster.finished("wipe")
    assert status["phase"] == "Partial"
    assert status["results"][0]["replica"] == "p3"
    assert status["results"][0]["outcome"] in ("Unreachable", "Unknown")
    assert cluster.effects() == [1, 1, 1, 0]


async def test_targets_by_name_and_by_label_reach_those_pods_only(cluster: Cluster) -> None:
    labelled = pod("p1", cluster.addresses[1])
    labelled["metadata"]["labels"]["pool"] = "a"
    await cluster.api.put("pods", labelled)
    async with cluster.operator():
        await cluster.apply("by-name", {**KEEP, "targets": {"names": ["p[2]", "p3"]}})
        await cluster.finished("by-name")
        await cluster.apply("by-label", {**KEEP, "targets": {"selector": "pool=a"}})
        await cluster.finished("by-label")
    assert cluster.effects() == [0, 1, 1, 1]


async def test_a_selector_that_means_nothing_ends_as_failed_and_calls_nobody(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", {**KEEP, "targets": {"names": ["no-such-pod"]}})
        status = await cluster.finished("wipe")
    assert status["phase"] == "Failed"
    assert "no-such-pod" in status["message"]
    assert cluster.effects() == [0] * 4


async def test_validate_only_changes_nothing(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("check", {**KEEP, "validateOnly": True})
        status = await cluster.finished("check")
    assert (status["phase"], status["operation"]) == ("Succeeded", "Reset Keep (checked only)")
    assert cluster.effects() == [0] * 4


async def test_a_rollout_that_an_older_definition_let_in_ends_as_failed_and_is_not_tried_again(
    cluster: Cluster,
) -> None:
    cluster.api.kinds["kvctl.dev", "cacheoperations"].schema = None
    await cluster.apply("wipe", {**KEEP, "rollout": {"strategy": "Rolling", "maxUnavailable": 10**9}})
    async with cluster.operator():
        status = await cluster.finished("wipe")
    assert (status["phase"], cluster.effects()) == ("Failed", [0] * 4)
    assert "max_unavailable is '1000000000'" in status["message"]


async def test_a_finished_operation_is_deleted_after_its_time(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", {**KEEP, "ttlSecondsAfterFinished": 0})
        await cluster.api.until(lambda: ("cacheoperations", "llm", "wipe") not in cluster.api.objects)
    assert cluster.effects() == [1] * 4


async def test_a_time_that_is_shortened_after_the_end_counts_from_then_on(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", {**KEEP, "ttlSecondsAfterFinished": 3600})
        await cluster.finished("wipe")
        await cluster.told("Succeeded")
        await cluster.api.merge("cacheoperations", "wipe", {"spec": {"ttlSecondsAfterFinished": 0}})
        await cluster.api.until(lambda: ("cacheoperations", "llm", "wipe") not in cluster.api.objects)


# --- rights ----------------------------------------------------------------------------------------------------------


def verb_of(method: str, path: str) -> tuple[str, str, str, str]:
    """(verb, group, resource, name) of a request, as RBAC sees it."""
    plain, _, query = path.partition("?")
    parts = plain.strip("/").split("/")
    group, rest = ("", parts[4:]) if parts[0] == "api" else (parts[1], parts[5:])
    name = rest[1] if len(rest) > 1 else ""
    resource = "/".join([rest[0], *rest[2:]])
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    if method == "GET":
        return ("get" if name else "watch" if "watch=" in query else "list"), group, resource, name
    return verbs[method], group, resource, name


async def test_the_role_in_the_manifests_grants_what_the_operator_asks_for_and_nothing_more(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", {**KEEP, "ttlSecondsAfterFinished": 0})
        await cluster.api.merge("pods", "p1", {"metadata": {"annotations": {"kvctl.dev/reset-on": "weights-1"}}})
        await cluster.api.until(lambda: ("cacheoperations", "llm", "wipe") not in cluster.api.objects)
        await cluster.api.until(
            lambda: "kvctl.dev/reset-done" in cluster.api.get("pods", "p1")["metadata"].get("annotations", {})
        )
        assert sum(cluster.effects()) == 5
        await cluster.apply("slices", {**KEEP, "validateOnly": True})
        await cluster.finished("slices")
    documents = yaml.safe_load_all((ROOT / "deploy/kustomize/base/operator-rbac.yaml").read_text())
    rules = next(d for d in documents if d["kind"] == "Role")["rules"]
    granted = {
        (verb, group, resource): set(rule.get("resourceNames", ()))
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    asked = [verb_of(method, path) for method, path in cluster.api.requests if "/namespaces/" in path]
    for verb, group, resource, name in asked:
        assert (verb, group, resource) in granted, f"not granted: {verb} {group}/{resource}"
        names = granted[verb, group, resource]
        assert not names or name in names
    outside = {path for _, path in cluster.api.requests if "/namespaces/" not in path}
    assert all(path in ("/api", "/apis", "/version") or path.count("/") <= 3 for path in outside), outside
    used = {(verb, group, resource) for verb, group, resource, _ in asked}
    # Slices are for endpoints:/// discovery, which the manifests do not use.
    left = {grant for grant in set(granted) - used if grant[2] != "endpointslices"}
    assert left == set()


# --- kubectl ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    path = tmp_path / "kubectl.yaml"
    path.write_text(kubeconfig_for(cluster.api.url))

    async def run(*words: str, stdin: str = "") -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            program("kubectl"),
            *words,
            env={**os.environ, "KUBECONFIG": str(path), "HOME": str(tmp_path)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
        return process.returncode or 0, out.decode()

    return run


MANIFEST = """
apiVersion: kvctl.dev/v1alpha1
kind: CacheOperation
metadata: {name: wipe}
spec:
  reset: {runningRequests: Keep, purpose: %s}
  targets: {all: true}
"""


async def test_kubectl_create_and_get_tell_the_story(cluster: Cluster, kubectl: Callable[..., Any]) -> None:
    async with cluster.operator():
        code, out = await kubectl("create", "--validate=false", "-f", "-", stdin=MANIFEST % "Benchmark")
        assert code == 0, out
        await cluster.finished("wipe")
    code, out = await kubectl("get", "cop")
    assert code == 0, out
    head, row = out.splitlines()
    assert head.split()[:5] == ["NAME", "OPERATION", "PHASE", "DONE", "FAILED"]
    assert row.split()[:5] == ["wipe", "Reset", "Keep", "Succeeded", "4/4"]
    code, out = await kubectl("wait", "--for=condition=Complete", "cacheoperation/wipe", "--timeout=5s")
    assert code == 0, out


async def test_kubectl_create_refuses_what_would_let_stale_kv_in(cluster: Cluster, kubectl: Callable[..., Any]) -> None:
    code, out = await kubectl("create", "--validate=false", "-f", "-", stdin=MANIFEST % "WeightUpdate")
    assert code != 0
    assert "stale KV would enter the cache" in out
