"""CacheOperations that are suspended, cancelled, deleted, or meet another one on the same pods."""

from __future__ import annotations

import asyncio

import pytest
from cluster import FINAL, KEEP, ROLLING, Cluster, gate

# --- steering --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", ["Forbid", "Replace"])
async def test_one_that_only_checks_runs_beside_another_and_cancels_none(cluster: Cluster, policy: str) -> None:
    reached, go = gate(cluster, 1, lambda request: not request.validate_only)
    async with cluster.operator():
        await cluster.apply("wipe", KEEP)
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("check", {**KEEP, "validateOnly": True, "concurrencyPolicy": policy})
        assert (await cluster.finished("check"))["phase"] == "Succeeded"
        assert cluster.status("wipe")["phase"] == "Running"
        go.set()
        assert (await cluster.finished("wipe"))["phase"] == "Succeeded"


@pytest.mark.parametrize("policy", ["Forbid", "Replace"])
async def test_one_that_only_checks_is_in_nobodys_way(cluster: Cluster, policy: str) -> None:
    reached, go = gate(cluster, 1, lambda request: request.validate_only)
    async with cluster.operator():
        await cluster.apply("check", {**KEEP, "validateOnly": True})
        await asyncio.wait_for(reached.wait(), 40)
        await cluster.apply("wipe", {**KEEP, "concurrencyPolicy": policy})
        assert (await cluster.finished("wipe"))["phase"] == "Succeeded"
        assert cluster.status("check")["phase"] == "Running"
        go.set()
        assert (await cluster.finished("check"))["phase"] == "Succeeded"
    assert cluster.effects() == [1, 1, 1, 1]
