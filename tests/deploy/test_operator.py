"""CacheOperations run against fake sidecars, through an API server: what a user sees, and what each pod gets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import Refused
from cluster import FINAL, KEEP, ROOT, Cluster, gate, kubeconfig_for, pod
from fake_sidecar_server import refused
from programs import program

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator.app import Operator

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
        assert (await cluster.finished("check"))["phase"] == "Succeeded"
    assert cluster.effects() == [0] * 4


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


# --- steering --------------------------------------------------------------------------------------------------------

ROLLING = {**KEEP, "rollout": {"strategy": "Rolling", "maxUnavailable": 1}}


async def test_suspend_holds_a_rollout_and_unsuspend_lets_it_go_on(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.api.merge("cacheoperations", "wipe", {"spec": {"suspend": True}})
        await cluster.api.until(lambda: cluster.status("wipe").get("phase") == "Suspended")
        go.set()
        await cluster.api.until(lambda: cluster.status("wipe")["counts"]["succeeded"] == 2)
        assert cluster.effects() == [1, 1, 0, 0]
        await cluster.api.merge("cacheoperations", "wipe", {"spec": {"suspend": False}})
        assert (await cluster.finished("wipe"))["phase"] == "Succeeded"


async def test_a_suspend_while_the_end_is_written_does_not_take_the_end_back(cluster: Cluster) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def late(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("/wipe/status") and cluster.status("wipe").get("progress") == "4/4":
            reached.set()
            await go.wait()

    cluster.api.faults = late
    async with cluster.operator() as operator:
        await cluster.apply("wipe", KEEP)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.api.merge("cacheoperations", "wipe", {"spec": {"suspend": True}})
        async with asyncio.timeout(30):
            while not all(run._held for run in operator.controller._runs.values()):  # noqa: ASYNC110 - until it is known
                await asyncio.sleep(0.01)
        go.set()
        await cluster.told("Succeeded")
    assert cluster.status("wipe")["phase"] == "Succeeded"


async def test_a_suspend_while_no_operator_runs_is_shown_by_the_next(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
    go.set()
    await cluster.api.merge("cacheoperations", "wipe", {"spec": {"suspend": True}})
    async with cluster.operator():
        await cluster.api.until(lambda: cluster.status("wipe")["phase"] == "Suspended")
    reached, go = gate(cluster, 2)
    await cluster.api.merge("cacheoperations", "wipe", {"spec": {"suspend": False}})
    async with cluster.operator():
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.api.until(lambda: cluster.status("wipe")["phase"] == "Running")
        go.set()
        assert (await cluster.finished("wipe"))["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_cancel_lets_the_call_under_way_finish_and_starts_no_other(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.api.merge("cacheoperations", "wipe", {"spec": {"cancel": True}})
        await cluster.api.until(lambda: bool(cluster.fakes[1].cancelled))
        go.set()
        status = await cluster.finished("wipe")
    assert status["phase"] == "Cancelled"
    assert status["counts"] == {**status["counts"], "succeeded": 2, "cancelled": 2}
    assert cluster.effects() == [1, 1, 0, 0]


async def test_deletion_needs_no_finalizer_and_cancels(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator() as operator:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        assert not cluster.api.get("cacheoperations", "wipe")["metadata"].get("finalizers")
        await cluster.api.remove("cacheoperations", "wipe")
        async with asyncio.timeout(30):
            while not cluster.fakes[1].cancelled:  # noqa: ASYNC110 - what the operator does, seen at the sidecar
                await asyncio.sleep(0.01)
        go.set()
        async with asyncio.timeout(30):
            while operator.controller.active:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
    assert cluster.effects() == [1, 1, 0, 0]


async def test_a_resource_made_anew_under_the_same_name_is_another_operation(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.api.remove("cacheoperations", "wipe")
        await cluster.apply("wipe", {**KEEP, "concurrencyPolicy": "Allow"})
        go.set()
        status = await cluster.finished("wipe")
    assert status["phase"] == "Succeeded"
    assert status["counts"]["total"] == 4
    assert cluster.effects() == [2, 2, 1, 1]


# --- concurrency -----------------------------------------------------------------------------------------------------


async def test_forbid_skips_an_operation_on_pods_that_are_busy_and_names_the_other(cluster: Cluster) -> None:
    reached, go = gate(cluster, 0)
    async with cluster.operator():
        await cluster.apply("first", KEEP)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {**KEEP, "targets": {"names": ["p0"]}})
        status = await cluster.finished("second")
        assert status["phase"] == "Skipped"
        assert "first" in status["message"]
        go.set()
        assert (await cluster.finished("first"))["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_a_new_leader_knows_what_is_under_way_before_it_begins_anything(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("old", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
    await cluster.apply("new", KEEP)
    objects = cluster.api.objects
    objects["cacheoperations", "llm", "old"] = objects.pop(("cacheoperations", "llm", "old"))  # listed last

    async def slow(method: str, path: str) -> None:
        if method == "GET" and path.endswith("/cacheoperations"):
            await asyncio.sleep(1)  # it leads before it knows

    cluster.api.faults = slow
    async with cluster.operator():
        assert (await cluster.finished("new"))["phase"] == "Skipped"
        go.set()
        assert (await cluster.finished("old"))["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_forbid_does_not_hinder_an_operation_on_other_pods(cluster: Cluster) -> None:
    reached, go = gate(cluster, 0)
    async with cluster.operator():
        await cluster.apply("first", {**KEEP, "targets": {"names": ["p0"]}})
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {**KEEP, "targets": {"names": ["p1"]}})
        assert (await cluster.finished("second"))["phase"] == "Succeeded"
        go.set()
        await cluster.finished("first")


async def test_replace_cancels_the_other_and_runs_after_it_has_ended(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("first", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {"reorder": {}, "targets": {"all": True}, "concurrencyPolicy": "Replace"})
        await cluster.api.until(lambda: bool(cluster.fakes[1].cancelled))
        assert cluster.status("second").get("phase") not in FINAL
        go.set()
        assert (await cluster.finished("first"))["phase"] == "Cancelled"
        assert "replaced by second" in str(cluster.status("first")["results"])
        assert (await cluster.finished("second"))["phase"] == "Succeeded"
    assert cluster.effects() == [2, 2, 1, 1]


async def test_allow_runs_both(cluster: Cluster) -> None:
    reached, go = gate(cluster, 0)
    async with cluster.operator():
        await cluster.apply("first", KEEP)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {"relieve": {}, "targets": {"all": True}, "concurrencyPolicy": "Allow"})
        assert (await cluster.finished("second"))["phase"] == "Succeeded"
        go.set()
        await cluster.finished("first")


# --- deaths ----------------------------------------------------------------------------------------------------------


async def test_an_operator_killed_in_a_rollout_is_followed_by_one_that_finishes_it_with_one_effect_a_pod(
    cluster: Cluster, tmp_path: Path
) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.process(tmp_path) as first:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 50)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    go.set()  # the call that the dead operator made takes its effect now
    started = cluster.status("wipe")["startTime"]
    async with cluster.process(tmp_path):
        status = await cluster.finished("wipe", 50)
    assert status["phase"] == "Succeeded"
    assert status["startTime"] == started
    assert status["counts"]["succeeded"] == 4
    assert cluster.effects() == [1, 1, 1, 1]


async def test_an_effect_whose_answer_died_with_the_operator_is_asked_for_and_not_repeated(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.fakes[2].forget_answers = True
    async with cluster.process(tmp_path) as first:
        await cluster.apply("wipe", KEEP)
        await cluster.api.until(lambda: cluster.status("wipe").get("counts", {}).get("succeeded") == 3)
        assert cluster.effects() == [1, 1, 1, 1]
        first.send_signal(signal.SIGKILL)
        await first.wait()
    requests = len(cluster.fakes[2].requests)
    async with cluster.process(tmp_path):
        status = await cluster.finished("wipe", 50)
    assert status["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]
    assert len(cluster.fakes[2].requests) == requests, "asked by request id, not called again"


async def test_a_pod_that_vanished_while_no_operator_ran_still_gets_its_one_result(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", {**ROLLING, "timeoutSeconds": 10})
        await asyncio.wait_for(reached.wait(), 40)
    await cluster.api.remove("pods", "p3")
    go.set()
    async with cluster.operator():
        status = await cluster.finished("wipe", 50)
    assert status["phase"] == "Partial"
    assert {row["replica"]: row["outcome"] for row in status["results"]}["p3"] == "Skipped"
    assert status["progress"] == "4/4"
    assert cluster.effects() == [1, 1, 1, 0]


async def test_of_two_operators_one_leads_and_the_other_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.process(tmp_path) as first:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 50)
        holder = cluster.api.get("leases", "kvctl-operator")["spec"]["holderIdentity"]
        async with cluster.process(tmp_path):
            first.send_signal(signal.SIGKILL)
            await first.wait()
            go.set()
            status = await cluster.finished("wipe", 50)
        lease = cluster.api.get("leases", "kvctl-operator")["spec"]
    assert lease["holderIdentity"] != holder
    assert lease["leaseTransitions"] >= 1
    assert status["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_a_leader_that_cannot_reach_the_api_server_stops_acting_before_another_may_start(
    cluster: Cluster,
) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator("--lease-duration", "1s") as operator:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)

        async def away(_method: str, _path: str) -> None:
            raise Refused(503, "ServiceUnavailable", "no leader")

        cluster.api.faults = away
        async with asyncio.timeout(30):
            while operator.controller.active:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)
        go.set()
        cluster.api.faults = None
        status = await cluster.finished("wipe", 50)
    assert status["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_an_api_server_that_is_away_for_a_moment_costs_no_effect_and_no_result(cluster: Cluster) -> None:
    failures = iter(range(3))

    async def flaky(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("/wipe/status") and next(failures, None) is not None:
            raise Refused(500, "InternalError", "etcdserver: request timed out")

    cluster.api.faults = flaky
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        status = await cluster.finished("wipe", 50)
    assert status["progress"] == "4/4"
    assert all(effects <= 1 for effects in cluster.effects())
    assert sum(cluster.effects()) == status["counts"]["succeeded"]


async def test_discovery_that_is_away_is_waited_for_and_shown_and_a_deletion_ends_the_wait(cluster: Cluster) -> None:
    async def no_pods(_method: str, path: str) -> None:
        if path.endswith("/pods"):
            raise Refused(503, "ServiceUnavailable", "etcd has no leader")

    cluster.api.faults = no_pods
    async with cluster.operator() as operator:
        await cluster.apply("given-up", KEEP)
        await cluster.api.until(lambda: cluster.status("given-up").get("phase") == "Pending")
        assert "etcd has no leader" in cluster.status("given-up")["message"]
        await cluster.api.remove("cacheoperations", "given-up")
        async with asyncio.timeout(30):
            while operator.controller.active:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)
        await cluster.apply("waited-for", KEEP)
        await cluster.api.until(lambda: cluster.status("waited-for").get("phase") == "Pending")
        cluster.api.faults = None
        assert (await cluster.finished("waited-for"))["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_a_rotated_service_account_token_is_picked_up(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    cluster.api.token = "one"
    words = ["--metrics", "off"]
    operator = Operator(operator_config.load(words, {}), Access(cluster.api.url, "llm", token_file=file))
    task = asyncio.create_task(operator.serve())
    await cluster.apply("before", KEEP)
    await cluster.finished("before")
    file.write_text("two\n")
    cluster.api.token = "two"
    await cluster.api.end_watches()
    await cluster.apply("after", KEEP)
    assert (await cluster.finished("after", 50))["phase"] == "Succeeded"
    operator.stop()
    await asyncio.wait_for(task, 30)


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
