"""What the status of a CacheOperation says before it begins, while it waits, and when it is changed after its end."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
from apiserver import Refused
from cluster import KEEP, ROLLING, Cluster, gate, pod
from kvctl.v1 import types_pb2

from sidecar.operator.resource import read


def conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in status["conditions"]}


async def test_one_that_replaces_another_says_whom_it_waits_for(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("first", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {**KEEP, "concurrencyPolicy": "Replace"})
        await cluster.api.until(lambda: cluster.status("second").get("phase") == "Pending")
        waiting = cluster.status("second")
        go.set()
        assert (await cluster.finished("second"))["phase"] == "Succeeded"
    assert waiting["operation"] == "Reset Keep"
    assert waiting["message"] == "waits for the end of first, which it replaces"
    complete = conditions(waiting)["Complete"]
    assert (complete["status"], complete["reason"]) == ("False", "Replacing")
    assert "first" in complete["message"]
    assert waiting["observedGeneration"] == 1


async def test_one_that_has_waited_runs_over_the_pods_that_are_there_when_its_turn_comes(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator() as operator:
        await cluster.apply("first", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {**KEEP, "concurrencyPolicy": "Replace"})
        await cluster.api.until(lambda: cluster.status("second").get("phase") == "Pending")
        await cluster.api.remove("pods", "p3")
        await cluster.api.put("pods", pod("p9", cluster.addresses[3]))
        async with asyncio.timeout(40):
            while "p9" not in {one.name for one in (await operator._discovery.targets()).targets}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        status = await cluster.finished("second")
    assert status["phase"] == "Succeeded"
    assert [row["replica"] for row in status["results"]] == ["p0", "p1", "p2", "p9"]
    assert cluster.effects() == [2, 2, 1, 1]


async def test_of_several_that_replace_each_other_the_last_one_runs(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("first", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        for name in ("second", "third"):
            await cluster.apply(name, {**KEEP, "concurrencyPolicy": "Replace"})
            await cluster.api.until(lambda name=name: cluster.status(name).get("phase") == "Pending")  # type: ignore[misc]
        assert (await cluster.finished("second"))["phase"] == "Cancelled"
        go.set()
        assert (await cluster.finished("third"))["phase"] == "Succeeded"
        assert (await cluster.finished("first"))["phase"] == "Cancelled"
    assert cluster.effects() == [2, 2, 1, 1]


async def test_one_that_waits_for_another_is_cancelled_at_once_and_has_called_nobody(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("first", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("second", {**KEEP, "concurrencyPolicy": "Replace"})
        await cluster.api.until(lambda: cluster.status("second").get("phase") == "Pending")
        await cluster.api.merge("cacheoperations", "second", {"spec": {"cancel": True}})
        assert (await cluster.finished("second"))["phase"] == "Cancelled"
        assert cluster.status("first")["phase"] == "Running", "its call has not ended yet"
        go.set()
        await cluster.finished("first")
    assert cluster.effects() == [1, 1, 0, 0]


async def test_discovery_in_trouble_is_a_condition_and_the_targets_are_not_called_complete(cluster: Cluster) -> None:
    async def no_pods(_method: str, path: str) -> None:
        if "/pods" in path:
            raise Refused(503, "ServiceUnavailable", "etcd has no leader")

    cluster.api.faults = no_pods
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        await cluster.api.until(lambda: cluster.status("wipe").get("phase") == "Pending")
        told = conditions(cluster.status("wipe"))
        assert told["Complete"]["reason"] == "DiscoveryFailed"
        assert "etcd has no leader" in told["Complete"]["message"]
        assert "TargetsComplete" not in told, "nobody has seen any target yet"
        cluster.api.faults = None
        assert conditions(await cluster.finished("wipe"))["TargetsComplete"]["status"] == "True"


async def test_a_rollout_that_waits_for_a_pod_s_health_says_so_in_its_message(cluster: Cluster) -> None:
    cluster.fakes[0].stalled, cluster.fakes[0].verdict = True, types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await cluster.api.until(lambda: "waiting for it to be healthy" in cluster.status("wipe").get("message", ""))
        told = cluster.status("wipe")["message"]
        assert cluster.effects() == [1, 0, 0, 0]
        cluster.fakes[0].stalled = False
        status = await cluster.finished("wipe", 60)
    assert told.startswith("p0: ")
    assert "HELD_BLOCKS_DEADLOCK" in told
    assert status["message"] == "all 4 targets succeeded"


async def test_a_change_after_the_end_is_observed_and_runs_nothing_again(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        before = conditions(await cluster.finished("wipe"))
        await cluster.told("Succeeded")
        for change in ({"suspend": True}, {"suspend": False}, {"cancel": True}, {"ttlSecondsAfterFinished": 3600}):
            await cluster.api.merge("cacheoperations", "wipe", {"spec": change})
            generation = cluster.api.get("cacheoperations", "wipe")["metadata"]["generation"]
            await cluster.api.until(
                lambda wanted=generation: cluster.status("wipe")["observedGeneration"] == wanted  # type: ignore[misc]
            )
        status = cluster.status("wipe")
    after = conditions(status)
    assert generation == 5
    assert status["phase"] == "Succeeded"
    assert "nothing is run again" in after["Complete"]["message"]
    assert {kind: one["status"] for kind, one in after.items()} == {kind: one["status"] for kind, one in before.items()}
    assert {one["observedGeneration"] for one in after.values()} == {5}
    for kind, one in after.items():
        assert one["lastTransitionTime"] == before[kind]["lastTransitionTime"], "nothing has changed but the generation"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_a_change_after_the_end_while_no_operator_ran_is_observed_by_the_next(cluster: Cluster) -> None:
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        await cluster.finished("wipe")
        await cluster.told("Succeeded")
    await cluster.api.merge("cacheoperations", "wipe", {"spec": {"cancel": True}})
    async with cluster.operator():
        await cluster.api.until(lambda: cluster.status("wipe")["observedGeneration"] == 2)
    assert read(cluster.api.get("cacheoperations", "wipe")).status.phase == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]


async def test_a_condition_keeps_the_time_of_its_last_change(cluster: Cluster) -> None:
    from sidecar.operator.resource import Condition
    from sidecar.operator.status import conditions as told_by

    was = [
        Condition("Complete", "False", "2026-01-01T00:00:00Z"),
        Condition("TargetsComplete", "True", "2026-01-01T00:00:00Z"),
    ]
    told = {
        one["type"]: one["lastTransitionTime"]
        for one in told_by("Succeeded", "", "2026-01-02T00:00:00Z", 1, False, was)
    }
    assert told == {
        "Complete": "2026-01-02T00:00:00Z",
        "Succeeded": "2026-01-02T00:00:00Z",
        "TargetsComplete": "2026-01-01T00:00:00Z",
    }


def newer_definition(cluster: Cluster) -> None:
    """The CRD of a later release, which allows a mode that this operator does not know."""
    kind = cluster.api.kinds["kvctl.dev", "cacheoperations"]
    schema = copy.deepcopy(kind.schema)
    assert schema is not None
    reset = schema["properties"]["spec"]["properties"]["reset"]
    reset["properties"]["runningRequests"]["enum"].append("Drain")
    cluster.api.kinds["kvctl.dev", "cacheoperations"] = replace(kind, schema=schema)


async def test_a_spec_that_this_operator_cannot_read_ends_as_failed_and_says_which_field(cluster: Cluster) -> None:
    newer_definition(cluster)
    async with cluster.operator():
        await cluster.apply("wipe", {**KEEP, "reset": {"runningRequests": "Drain"}})
        status = await cluster.finished("wipe")
        await cluster.told("InvalidSpec")
        await cluster.apply("next", KEEP)
        assert (await cluster.finished("next"))["phase"] == "Succeeded"
    assert status["phase"] == "Failed"
    assert "Drain" in status["message"]
    assert "$.spec.reset.runningRequests" in status["message"]
    told = conditions(status)
    assert (told["Complete"]["status"], told["Succeeded"]["status"]) == ("True", "False")
    assert told["Complete"]["message"] == status["message"]
    assert status["observedGeneration"] == 1
    assert status["completionTime"]
    assert cluster.effects() == [1, 1, 1, 1]


async def test_one_that_was_begun_by_an_operator_that_could_read_it_is_left_to_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    newer_definition(cluster)
    begun = {"phase": "Running", "operationId": "7f3f3cf6-5a0c-4f9e-9a39-3a8a36b1c001", "progress": "1/4"}
    body = {
        "apiVersion": "kvctl.dev/v1alpha1",
        "kind": "CacheOperation",
        "metadata": {"name": "wipe"},
        "spec": {**KEEP, "reset": {"runningRequests": "Drain"}},
        "status": begun,
    }
    await cluster.api.put("cacheoperations", body)
    async with cluster.operator():
        await cluster.apply("next", KEEP)
        await cluster.finished("next")
    assert cluster.status("wipe") == begun
    assert "llm/wipe: left as it is" in caplog.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": {"name": 1}, "spec": {}}, "$.metadata.name"),
        ({"metadata": {}, "spec": {}, "status": 1}, "$.status"),
    ],
)
def test_of_what_is_no_cacheoperation_at_all_the_field_is_told(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field.replace("$", r"\$")):
        read(body)
