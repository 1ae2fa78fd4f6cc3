"""Operators that are killed or cut off, and discovery and API servers that are away: one effect a pod all the same."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from apiserver import Refused
from cluster import KEEP, ROLLING, Cluster, gate

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator.app import Operator


def logs_in(folder: Path) -> str:
    return "".join(log.read_text() for log in folder.glob("operator-*.log"))


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
    told = logs_in(tmp_path)
    assert " leads" in told
    assert "Handler" not in told, "no line for each change of each pod"


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
