"""A pod that goes during an operation is not called, and what has its address by then is never reset in its name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from cluster import KEEP, Cluster, gate, pod
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.sources import JoinedDiscovery
from sidecar.coordinator.discovery.static import StaticDiscovery
from sidecar.coordinator.fanout import POD_UID, GrpcReplicas
from sidecar.coordinator.pods import PodReplicas, Pods
from sidecar.coordinator.port import Aim, Answer
from sidecar.coordinator.targets import Discovered, Target
from sidecar.operator.app import Operator

ROLLING = {**KEEP, "rollout": {"strategy": "Rolling", "maxUnavailable": 1, "maxFailures": 4}}


async def replace(cluster: Cluster, number: int, successor: str) -> None:
    """A pod goes, and the next one gets its address: the sidecar there says no more than before."""
    await cluster.api.remove("pods", f"p{number}")
    await cluster.api.put("pods", pod(successor, cluster.addresses[number]))


async def seen(operator: Operator, name: str) -> None:
    """Wait until the operator's discovery knows a pod."""
    async with asyncio.timeout(40):
        while name not in {target.name for target in (await operator._discovery.targets()).targets}:  # noqa: ASYNC110 - what the watch does
            await asyncio.sleep(0.01)


def row(status: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in status["results"] if one["replica"] == name]
    return dict(found)


async def test_an_address_that_is_another_pod_s_by_its_turn_is_not_called(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator() as operator:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        await replace(cluster, 3, "successor")
        await seen(operator, "successor")
        go.set()
        status = await cluster.finished("wipe")
    assert status["phase"] == "Partial"
    assert row(status, "p3")["outcome"] == "Skipped"
    assert "the pod p3" in row(status, "p3")["message"]
    assert "is gone" in row(status, "p3")["message"]
    assert status["progress"] == "4/4"
    assert cluster.effects() == [1, 1, 1, 0]


@pytest.mark.parametrize("how", ["deleted", "replaced", "terminating"])
async def test_a_pod_that_goes_before_its_turn_is_skipped_and_the_rollout_goes_on(cluster: Cluster, how: str) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator() as operator:
        await cluster.apply("wipe", {**KEEP, "rollout": {"strategy": "Rolling", "maxUnavailable": 1}})
        await asyncio.wait_for(reached.wait(), 40)
        if how == "deleted":
            await cluster.api.remove("pods", "p2")
        elif how == "replaced":
            await replace(cluster, 2, "successor")
        else:
            leaving = pod("p2", cluster.addresses[2], deletionTimestamp="2026-01-01T00:00:00Z")
            leaving["metadata"]["uid"] = cluster.api.get("pods", "p2")["metadata"]["uid"]
            await cluster.api.put("pods", leaving)
        async with asyncio.timeout(40):
            while "p2" in {t.name for t in (await operator._discovery.targets()).targets if not t.not_ready}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        status = await cluster.finished("wipe")
    assert status["phase"] == "Partial"
    assert row(status, "p2")["outcome"] == "Skipped"
    assert ("terminating" if how == "terminating" else "is gone") in row(status, "p2")["message"]
    assert cluster.effects() == [1, 1, 0, 1]
    counts = status["counts"]
    assert (counts["succeeded"], counts["skipped"], counts["failed"]) == (3, 1, 0)


async def test_a_pod_made_anew_under_the_same_name_and_address_is_another_one(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator() as operator:
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
        before = cluster.api.get("pods", "p3")["metadata"]["uid"]
        await replace(cluster, 3, "p3")
        async with asyncio.timeout(40):
            while before in {one.identity for one in (await operator._discovery.targets()).targets}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        status = await cluster.finished("wipe")
    assert row(status, "p3")["outcome"] == "Skipped"
    assert cluster.effects() == [1, 1, 1, 0]


async def test_a_pod_replaced_while_no_operator_ran_is_not_called_by_the_next(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
    await replace(cluster, 3, "successor")
    go.set()
    async with cluster.operator():
        status = await cluster.finished("wipe", 50)
    assert row(status, "p3")["outcome"] == "Skipped"
    assert cluster.effects()[3] == 0


async def test_a_call_to_a_pod_that_was_replaced_since_stays_unknown_and_its_successor_is_not_asked_for_it(
    cluster: Cluster,
) -> None:
    """Whether the pod that is gone has executed it, nobody can tell; least of all the pod that is there now."""
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await cluster.apply("wipe", ROLLING)
        await asyncio.wait_for(reached.wait(), 40)
    await replace(cluster, 1, "successor")
    go.set()
    calls = len(cluster.fakes[1].requests)
    async with cluster.operator():
        status = await cluster.finished("wipe", 50)
    assert row(status, "p1")["outcome"] == "Unknown"
    assert "cannot be asked" in row(status, "p1")["message"]
    assert len(cluster.fakes[1].requests) == calls


async def test_a_sidecar_that_tells_the_uid_of_another_pod_is_not_called(cluster: Cluster) -> None:
    """The watch may be a moment behind; what the sidecar says of itself is not."""
    cluster.fakes[3].labels = {POD_UID: "11111111-2222-3333-4444-555555555555"}
    cluster.fakes[2].labels = {POD_UID: cluster.api.get("pods", "p2")["metadata"]["uid"]}
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        status = await cluster.finished("wipe")
    assert row(status, "p3")["outcome"] == "Skipped"
    assert "another pod (uid 11111111)" in row(status, "p3")["message"]
    assert cluster.effects() == [1, 1, 1, 0]


async def test_a_coordinator_s_own_plan_is_held_to_the_uid_that_a_sidecar_tells(cluster: Cluster) -> None:
    channels = Channels()
    cluster.fakes[0].labels = {POD_UID: "uid-0"}
    same, other = [
        await GrpcReplicas(channels).identify(Aim("p0", cluster.addresses[0], identity=uid), 10)
        for uid in ("uid-0", "uid-1")
    ]
    await channels.close()
    assert same == "uid-0"
    assert isinstance(other, Answer)
    assert other.result.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED


async def test_the_watch_is_enough_to_know_that_every_pod_is_still_there(cluster: Cluster) -> None:
    def lists() -> int:
        return sum("/pods?limit=" in path for _, path in cluster.api.requests)

    async with cluster.operator() as operator:
        async with asyncio.timeout(40):
            while not operator._sources[0]._view.current:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        before = lists()
        await cluster.apply("wipe", KEEP)
        await cluster.finished("wipe")
        assert lists() == before


# --- one look --------------------------------------------------------------------------------------------------------


def target(name: str, address: str, uid: str, *, not_ready: str = "") -> Target:
    return Target(address, name, not_ready=not_ready, identity=uid)


AIM = Aim("p0", "10.0.0.1:7700", identity="uid-0")


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([target("p0", "10.0.0.1:7700", "uid-0")], ""),
        ([target("p0", "10.0.0.1:7700", "uid-0", not_ready="terminating")], ""),
        ([target("p0", "[fd00::1]:7700", "uid-0")], ""),
        ([], "is gone"),
        ([target("p0", "10.0.0.1:7700", "uid-1")], "is gone"),
        ([target("p1", "10.0.0.1:7700", "uid-1")], "is gone"),
        (
            [target("p0", "10.0.0.1:7700", "uid-0", not_ready="terminating"), target("p1", "10.0.0.1:7700", "uid-1")],
            "which the pod p1 has now",
        ),
        ([target("p0", "10.0.0.9:7700", "uid-0"), target("p1", "10.0.0.1:7700", "uid-1")], "which the pod p1 has now"),
    ],
    ids=[
        "there",
        "still there, and terminating",
        "there, seen by its other address",
        "gone",
        "made anew",
        "gone, and its address another's",
        "going, and its address another's",
        "moved, and its address another's",
    ],
)
def test_who_is_at_an_address_is_told_by_the_uids_of_pods(pods: Sequence[Target], why: str) -> None:
    told = Pods.of(pods).replaced(AIM)
    assert why in told
    assert bool(told) == bool(why)


def test_a_target_without_a_uid_is_not_doubted() -> None:
    assert Pods.of([]).replaced(Aim("p0", "10.0.0.1:7700")) == ""


class NoAnswer:
    """A discovery that was never able to see anything."""

    async def targets(self) -> Discovered:
        raise DiscoveryError("pods: etcd has no leader")

    def describe(self) -> str:
        return "pods"


@pytest.mark.parametrize("beside", [[], [StaticDiscovery([Target("127.0.0.1:1", "other")])]], ids=["alone", "joined"])
async def test_a_pod_of_which_nothing_is_known_is_not_called_and_may_be_tried_again(
    cluster: Cluster, beside: list[StaticDiscovery]
) -> None:
    """Where another source answers, that one has nothing to say of it: it is not told as gone."""
    channels = Channels()
    replicas = PodReplicas(channels, JoinedDiscovery([*beside, NoAnswer()]))
    answer = await replicas.identify(Aim("p0", cluster.addresses[0], identity="uid-0"), 10)
    health = await replicas.health(Aim("p0", cluster.addresses[0], identity="uid-0"), fleet_pb2.OperationSpec(), 10)
    await channels.close()
    assert isinstance(answer, Answer)
    assert answer.result.code == "UNAVAILABLE"
    assert "etcd has no leader" in answer.result.message
    assert not health.healthy
    assert cluster.fakes[0].identity_calls == 0
