"""The annotation kvctl.dev/reset-on: whatever comes between, no KV of older weights is left and called done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from apiserver import Refused
from cluster import Cluster, gate, pod
from fake_sidecar_server import refused
from kvctl.v1 import types_pb2

from sidecar.coordinator.discovery.kube_rows import Meta, Pod
from sidecar.operator import reset_on
from sidecar.operator.reset_on import RESET_DONE, RESET_FAILED, RESET_ON, RESET_OPERATION
from sidecar.rpc import errors

POD = "p1"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed reset is tried again soon; that is all that these tests take from the clock."""
    monkeypatch.setattr(reset_on.ResetOn.__init__, "__defaults__", ((0.05, 0.1, 0.2),))


async def annotate(cluster: Cluster, value: str | None, name: str = POD) -> None:
    await cluster.api.merge("pods", name, {"metadata": {"annotations": {RESET_ON: value}}})


def annotations(cluster: Cluster, name: str = POD) -> dict[str, str]:
    found: dict[str, str] = cluster.api.get("pods", name)["metadata"].get("annotations") or {}
    return found


async def done(cluster: Cluster, value: str, name: str = POD) -> None:
    await cluster.api.until(lambda: annotations(cluster, name).get(RESET_DONE) == value)


def operations(cluster: Cluster) -> list[dict[str, Any]]:
    return [body for (plural, _, _), body in cluster.api.objects.items() if plural == "cacheoperations"]


def values(cluster: Cluster) -> list[str]:
    """The value of each CacheOperation, in the order in which they were made."""
    return [operation["metadata"]["annotations"][RESET_ON] for operation in operations(cluster)]


# --- the ordinary way ------------------------------------------------------------------------------------------------


async def test_a_pod_is_reset_once_for_each_new_value_and_no_other_pod_is(cluster: Cluster) -> None:
    async with cluster.operator():
        for version in ("weights-1", "weights-2", "weights-2"):
            await annotate(cluster, version)
            await done(cluster, version)
    # A new operator sees the same annotation and knows that it was acted on.
    async with cluster.operator():
        await annotate(cluster, "weights-1", "p0")
        await done(cluster, "weights-1", "p0")
    assert cluster.effects() == [1, 2, 0, 0]


async def test_it_clears_every_tier_that_depends_on_the_weights_and_bars_what_kept_requests_fill(
    cluster: Cluster,
) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    (request,) = cluster.fakes[1].requests
    assert request.running_requests == types_pb2.RUNNING_REQUESTS_KEEP  # type: ignore[attr-defined]
    assert request.purpose == types_pb2.PURPOSE_WEIGHT_UPDATE  # type: ignore[attr-defined]
    assert request.quarantine_running  # type: ignore[attr-defined]
    assert request.reset_connector  # type: ignore[attr-defined]
    assert request.reset_encoder_cache  # type: ignore[attr-defined]


async def test_the_cacheoperation_belongs_to_the_pod_and_carries_the_value(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    (operation,) = operations(cluster)
    (owner,) = operation["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.api.get("pods", POD)["metadata"]["uid"]
    assert operation["metadata"]["annotations"] == {RESET_ON: "weights-1"}
    assert annotations(cluster)[RESET_OPERATION] == operation["metadata"]["name"]


@pytest.mark.parametrize("value", ["weights-1 ", " weights-1", "weights-1\n", "step 4200", "重み-1"])
async def test_done_says_the_very_value_that_was_set(cluster: Cluster, value: str) -> None:
    """Who set it waits for that one; a shell leaves a newline, a template a space."""
    async with cluster.operator():
        await annotate(cluster, value)
        await done(cluster, value)
        await annotate(cluster, "another")
        await done(cluster, "another")
    assert values(cluster) == [value, "another"]
    assert cluster.effects() == [0, 2, 0, 0]


async def test_a_value_of_nothing_but_space_asks_for_nothing(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, " \n", "p0")
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 0, 0]


# --- done means done -------------------------------------------------------------------------------------------------


async def test_a_value_is_not_done_before_its_reset_has_succeeded(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await asyncio.wait_for(reached.wait(), 40)
        assert RESET_DONE not in annotations(cluster)
        go.set()
        await done(cluster, "weights-1")


async def test_a_reset_that_failed_is_followed_by_another_until_one_succeeds(cluster: Cluster) -> None:
    cluster.fakes[1].fail_with = [errors.failure(errors.grpc.StatusCode.INTERNAL, "OPERATION_RAISED", "no")]
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await cluster.api.until(
            lambda: sum(one.get("status", {}).get("phase") == "Failed" for one in operations(cluster)) >= 2
        )
        assert RESET_DONE not in annotations(cluster)
        cluster.fakes[1].fail_with = []
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 0, 0]


async def test_a_refusal_is_asked_again_within_one_operation(cluster: Cluster) -> None:
    cluster.fakes[1].fail_with = [refused()]

    async def give_in(kind: str) -> None:
        if len(cluster.fakes[1].requests) == 3:
            cluster.fakes[1].fail_with = []

    cluster.fakes[1].before = give_in
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    assert len(operations(cluster)) == 1


async def test_what_no_repetition_mends_is_said_on_the_pod_and_a_new_value_is_a_new_try(cluster: Cluster) -> None:
    why = "connector tier unsupported: SomeConnector cannot be reset; clear its store where it runs"
    lacking = errors.failure(errors.grpc.StatusCode.UNIMPLEMENTED, "TIER_UNSUPPORTED", why)
    cluster.fakes[1].fail_with = [lacking]
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await cluster.api.until(lambda: RESET_FAILED in annotations(cluster))
        assert "clear its store where it runs" in annotations(cluster)[RESET_FAILED]
        assert RESET_DONE not in annotations(cluster)
        assert values(cluster) == ["weights-1"]
        cluster.fakes[1].fail_with = []
        await annotate(cluster, "weights-2")
        await done(cluster, "weights-2")
    assert RESET_FAILED not in annotations(cluster)


async def test_a_pod_without_a_sidecar_is_given_up_after_some_tries_and_told_what_to_do_once(cluster: Cluster) -> None:
    bare = pod("bare", "127.0.0.1:1", labels={"app": "vllm"}, annotations={RESET_ON: "weights-1"})
    await cluster.api.put("pods", bare)
    async with cluster.operator():
        await cluster.api.until(lambda: RESET_FAILED in annotations(cluster, "bare"))
        await cluster.api.until(lambda: "ResetOnFailed" in cluster.reasons())
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")  # others are served meanwhile
        told = annotations(cluster, "bare")[RESET_FAILED]
        assert "no sidecar" in told
        assert "deploy/kustomize/components/sidecar" in told
        assert "set a new value" in told
        assert values(cluster) == ["weights-1"] * (reset_on.UNDISCOVERED_TRIES + 1), "the last one is p1's"
        assert RESET_DONE not in annotations(cluster, "bare")
        events = [body for (plural, _, _), body in cluster.api.objects.items() if plural == "events"]
        (event,) = [one for one in events if one["reason"] == "ResetOnFailed"]
        assert event["involvedObject"]["kind"] == "Pod"
        assert event["involvedObject"]["name"] == "bare"
        assert "weights-1 is given up" in event["message"]
        # With a sidecar and a new value it is a new try.
        await cluster.api.remove("pods", "p3")
        mended = pod("bare", cluster.addresses[3], annotations={**annotations(cluster, "bare"), RESET_ON: "weights-2"})
        await cluster.api.put("pods", mended)
        await done(cluster, "weights-2", "bare")
    assert RESET_FAILED not in annotations(cluster, "bare")
    assert cluster.effects() == [0, 1, 0, 1]


async def test_a_pod_that_discovery_sees_a_moment_later_is_reset_then(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reset_on, "UNDISCOVERED_TRIES", 1000)  # a moment is as long as this test takes
    await cluster.api.put(
        "pods", pod("late", "127.0.0.1:1", labels={"app": "vllm"}, annotations={RESET_ON: "weights-1"})
    )
    async with cluster.operator():
        await cluster.api.until(
            lambda: any(one.get("status", {}).get("phase") == "Failed" for one in operations(cluster))
        )
        await cluster.api.remove("pods", "p3")
        await cluster.api.put("pods", pod("late", cluster.addresses[3], annotations=annotations(cluster, "late")))
        await done(cluster, "weights-1", "late")
    assert RESET_FAILED not in annotations(cluster, "late")


async def test_a_cacheoperation_that_somebody_deletes_is_made_again(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await asyncio.wait_for(reached.wait(), 40)
        (first,) = operations(cluster)
        await cluster.api.remove("cacheoperations", first["metadata"]["name"])
        go.set()
        await done(cluster, "weights-1")
        (second,) = operations(cluster)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]


# --- readiness -------------------------------------------------------------------------------------------------------


async def test_a_pod_that_is_not_ready_is_reset_when_it_is_again(cluster: Cluster) -> None:
    await cluster.api.put("pods", pod(POD, cluster.addresses[1], ready=False))
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await annotate(cluster, "weights-1", "p2")
        await done(cluster, "weights-1", "p2")  # the events of both have been seen by now
        assert RESET_DONE not in annotations(cluster)
        assert cluster.effects() == [0, 0, 1, 0]
        assert len(operations(cluster)) == 1, "it is waited for, not tried"
        await cluster.api.put("pods", pod(POD, cluster.addresses[1], annotations={RESET_ON: "weights-1"}))
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 1, 0]


async def test_a_pod_that_is_made_with_the_annotation_is_reset_once_when_it_is_ready(cluster: Cluster) -> None:
    await cluster.api.put("pods", pod("p2", cluster.addresses[2], annotations={RESET_ON: "weights-1"}))
    async with cluster.operator():
        await done(cluster, "weights-1", "p2")
    assert cluster.effects() == [0, 0, 1, 0]


async def test_a_container_that_restarts_during_the_reset_leaves_nothing_undone(cluster: Cluster) -> None:
    """The engine is away in the middle: the pod loses its readiness, and the call its answer."""
    gone = errors.failure(errors.grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPING", "the engine is shutting down")
    cluster.fakes[1].fail_with = [gone]
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await cluster.api.until(lambda: len(operations(cluster)) == 1)
        written = annotations(cluster)
        await cluster.api.put("pods", pod(POD, cluster.addresses[1], ready=False, annotations=written))
        cluster.fakes[1].fail_with = []
        await cluster.api.put("pods", pod(POD, cluster.addresses[1], annotations=annotations(cluster)))
        await done(cluster, "weights-1")
    assert cluster.effects()[1] >= 1


async def test_a_pod_made_anew_under_the_same_name_is_another_one(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
        await cluster.api.remove("pods", POD)
        await cluster.api.put("pods", pod(POD, cluster.addresses[1], annotations={RESET_ON: "weights-1"}))
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 2, 0, 0]


# --- values that follow each other ----------------------------------------------------------------------------------


async def test_a_value_that_changes_during_a_reset_gets_one_of_its_own_and_the_last_one_wins(cluster: Cluster) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await asyncio.wait_for(reached.wait(), 40)
        await annotate(cluster, "weights-2")
        await cluster.api.until(lambda: values(cluster) == ["weights-1", "weights-2"])
        go.set()
        await done(cluster, "weights-2")
        seen = [
            body["metadata"]["annotations"].get(RESET_DONE)
            for _, plural, _, body in cluster.api.history
            if plural == "pods" and body["metadata"]["name"] == POD and body["metadata"].get("annotations")
        ]
    assert "weights-1" not in seen, "what was done for the old value does not count for the new one"
    assert cluster.effects() == [0, 2, 0, 0]


async def test_a_value_that_returns_is_a_new_demand(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
        await annotate(cluster, "weights-2")
        await done(cluster, "weights-2")
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 3, 0, 0]


async def test_a_value_that_returns_before_the_other_s_reset_has_ended_is_a_new_demand(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
        reached, go = gate(cluster, 1)
        await annotate(cluster, "weights-2")
        await asyncio.wait_for(reached.wait(), 40)
        await annotate(cluster, "weights-1")
        await cluster.api.until(lambda: values(cluster) == ["weights-1", "weights-2", "weights-1"])
        go.set()
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 3, 0, 0]


async def test_a_value_that_changes_while_the_old_one_is_taken_up_is_the_one_that_is_taken_up(cluster: Cluster) -> None:
    changes = iter(["weights-2"])

    async def change(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith(f"/pods/{POD}") and (value := next(changes, None)):
            await annotate(cluster, value)

    cluster.api.faults = change
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-2")
    assert values(cluster) == ["weights-2"]


async def test_an_annotation_that_is_taken_away_ends_the_tries(cluster: Cluster) -> None:
    cluster.fakes[1].fail_with = [errors.failure(errors.grpc.StatusCode.INTERNAL, "OPERATION_RAISED", "no")]
    async with cluster.operator() as operator:
        await annotate(cluster, "weights-1")
        await cluster.api.until(lambda: len(operations(cluster)) >= 2)
        await annotate(cluster, None)
        await annotate(cluster, "weights-1", "p2")
        await done(cluster, "weights-1", "p2")
        async with asyncio.timeout(40):
            while operator.controller.active:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)
        before = len(operations(cluster))
        await annotate(cluster, "weights-1", "p3")
        await done(cluster, "weights-1", "p3")
        assert len(operations(cluster)) == before + 1


# --- deaths and troubles ---------------------------------------------------------------------------------------------


async def test_a_value_that_changed_while_no_operator_ran_is_acted_on_by_the_next(cluster: Cluster) -> None:
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    await annotate(cluster, "weights-2")
    async with cluster.operator():
        await done(cluster, "weights-2")
    assert cluster.effects() == [0, 2, 0, 0]


async def test_a_leader_that_goes_between_the_reset_and_its_record_is_followed_by_one_that_records_it(
    cluster: Cluster,
) -> None:
    reached, go = gate(cluster, 1)
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await asyncio.wait_for(reached.wait(), 40)
    assert RESET_DONE not in annotations(cluster)
    go.set()
    async with cluster.operator():
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 0, 0]
    assert len(operations(cluster)) == 1


async def test_a_leader_that_goes_before_the_cacheoperation_is_made_is_followed_by_one_that_makes_it(
    cluster: Cluster,
) -> None:
    refusing = asyncio.Event()

    async def no_creation(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/cacheoperations"):
            refusing.set()
            raise Refused(503, "ServiceUnavailable", "etcd has no leader")

    cluster.api.faults = no_creation
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await asyncio.wait_for(refusing.wait(), 40)
    assert RESET_OPERATION in annotations(cluster)
    cluster.api.faults = None
    async with cluster.operator():
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 0, 0]


async def test_a_new_leader_keeps_its_lease_while_it_catches_up(cluster: Cluster) -> None:
    for name in ("p0", "p1", "p2"):
        await annotate(cluster, "weights-1", name)
    known, reached, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/leases"):
            await known.wait()  # it leads when it knows the pods
        if method == "PATCH" and "/pods/" in path:
            reached.set()
            await go.wait()

    def renewals() -> int:
        return sum(method == "PUT" and "/leases/" in path for method, path in cluster.api.requests)

    cluster.api.faults = slow
    async with cluster.operator("--lease-duration", "1s") as operator:
        async with asyncio.timeout(40):
            while len(operator._reset_on._pods) < 3:  # noqa: ASYNC110 - what the watch does
                await asyncio.sleep(0.01)
        known.set()
        await asyncio.wait_for(reached.wait(), 40)
        before = renewals()
        await cluster.api.until(lambda: renewals() >= before + 3)
        go.set()
        await done(cluster, "weights-1", "p0")
        await done(cluster, "weights-1", "p2")


async def test_trouble_with_the_api_server_is_tried_again_without_another_event_of_the_pod(cluster: Cluster) -> None:
    failures = iter(range(3))

    async def flaky(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith(f"/pods/{POD}") and next(failures, None) is not None:
            raise Refused(500, "InternalError", "etcdserver: request timed out")

    cluster.api.faults = flaky
    async with cluster.operator():
        await annotate(cluster, "weights-1")
        await done(cluster, "weights-1")
    assert cluster.effects() == [0, 1, 0, 0]


# --- pure ------------------------------------------------------------------------------------------------------------


def test_names_differ_by_pod_value_and_number_and_fit_into_a_name() -> None:
    one = Pod(Meta(name="a" * 63, uid="u1"))
    other = Pod(Meta(name="a" * 63, uid="u2"))
    names = {reset_on.operation_name(p, v, n) for p in (one, other) for v in ("1", "2") for n in (1, 2)}
    assert len(names) == 8
    assert all(len(name) <= 63 for name in names)


def test_a_pod_that_is_being_deleted_is_left_alone() -> None:
    meta = Meta(name="p", uid="u", annotations={RESET_ON: "1"}, deletion_timestamp="2026-01-01T00:00:00Z")
    assert reset_on.wanted(Pod(meta)) == ""
