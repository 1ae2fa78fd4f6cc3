"""A coordinator that finds its replicas by the EndpointSlices of a service, kept current by a watch."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from apiserver import serving as api_serving
from kvctl.v1 import fleet_pb2
from rich.console import Console

from sidecar.cli.printers import replicas as printer
from sidecar.client.direct import DirectReach
from sidecar.client.reach import Reach
from sidecar.client.remote import CoordinatorReach
from sidecar.coordinator.discovery.sources import discovery_of
from tests.contract.coordinator_in_process import coordinator, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar, serving


def a_slice(address: str, **conditions: bool) -> dict[str, object]:
    """One slice a replica: fakes share 127.0.0.1 and differ by port. Ready, unless `conditions` say otherwise."""
    host, _, port = address.rpartition(":")
    name = f"vllm-{port}"
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm-kvctl"}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": True, **conditions},
                "targetRef": {"kind": "Pod", "name": name, "uid": name},
            }
        ],
        "ports": [{"name": "kvctl", "port": int(port)}],
    }


def kubeconfig(folder: Path, url: str) -> Path:
    file = folder / "kubeconfig"
    file.write_text(
        f"current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u, namespace: llm}}}}]\n"
        f"clusters: [{{name: c, cluster: {{server: '{url}'}}}}]\nusers: [{{name: u, user: {{}}}}]\n"
    )
    return file


async def test_a_scale_up_is_seen_by_the_next_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [FakeSidecar("a"), FakeSidecar("b")]
    async with api_serving() as api, serving(*fakes) as addresses:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.url)))
        await api.put("endpointslices", a_slice(addresses[0]))
        async with coordinator(tmp_path, ["endpoints:///llm/vllm-kvctl"]) as running:
            assert (await running.run(keep_reset())).counts.succeeded == 1
            await api.put("endpointslices", a_slice(addresses[1]))

            for _ in range(200):
                done = await running.run(keep_reset())
                if done.counts.total == 2:
                    break
                await asyncio.sleep(0.05)
            assert done.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
            assert done.counts.succeeded == 2
    assert fakes[1].effects


@pytest.mark.parametrize("through", ["a coordinator", "kvctl itself"])
async def test_pods_that_must_not_be_called_are_skipped_with_the_reason_and_not_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    fakes = [FakeSidecar("a"), FakeSidecar("b"), FakeSidecar("c")]
    source = "endpoints:///llm/vllm-kvctl"
    async with api_serving() as api, serving(*fakes) as addresses:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.url)))
        await api.put("endpointslices", a_slice(addresses[0]))
        await api.put("endpointslices", a_slice(addresses[1], ready=False))
        await api.put("endpointslices", a_slice(addresses[2], ready=False, terminating=True))
        if through == "a coordinator":
            async with coordinator(tmp_path, [source]) as running:
                await look_and_reset(CoordinatorReach(running.address), addresses)
        else:
            await look_and_reset(DirectReach(discovery_of([source])), addresses)
    assert fakes[0].effects
    assert not fakes[1].effects + fakes[2].effects


async def look_and_reset(reach: Reach, addresses: list[str]) -> None:
    everyone = fleet_pb2.Targets(all=True)
    why = {addresses[1]: "not called: the pod is not ready", addresses[2]: "not called: the pod is terminating"}
    try:
        listed = await reach.replicas(everyone)
        admission = await reach.admission(everyone, 10)
        done = await reach.run(keep_reset())
    finally:
        await reach.close()
    skipped = [row for row in listed.replicas if row.reason == "TARGET_NOT_READY"]
    assert {row.address: row.message for row in skipped} == why
    assert [row.address for row in listed.replicas if row.reachable] == [addresses[0]]
    unseen = {row.address: row.message for row in admission.replicas if row.reason == "TARGET_NOT_READY"}
    assert unseen == why
    apart = [row for row in done.results if row.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED]
    assert {row.address: row.message for row in apart} == why
    assert done.state == fleet_pb2.OPERATION_STATE_PARTIAL

    screen = io.StringIO()
    printer.print_table(Console(file=screen, width=120), listed)
    assert screen.getvalue().count("skipped") == 2
    assert "unreachable" not in screen.getvalue()
    assert "the pod is terminating" in screen.getvalue()


async def test_a_pod_that_goes_before_its_turn_is_skipped_and_the_rollout_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [FakeSidecar(name) for name in "abcd"]
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait(kind: str) -> None:
        if kind == "reset":
            reached.set()
            await go.wait()

    for fake in fakes:
        fake.before = wait
    async with api_serving() as api, serving(*fakes) as addresses:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.url)))
        for address in addresses:
            await api.put("endpointslices", a_slice(address))
        async with coordinator(tmp_path, ["endpoints:///llm/vllm-kvctl"]) as running:
            started = await running.start(keep_reset(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING))
            await asyncio.wait_for(reached.wait(), 40)
            waiting = [row.address for row in started.results][2]
            await api.remove("endpointslices", f"vllm-{waiting.rpartition(':')[2]}")
            async with asyncio.timeout(40):
                while len((await running.stub.ListReplicas(fleet_pb2.ListReplicasRequest())).replicas) > 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            go.set()
            done = await running.ended(started.operation_id)
    [gone] = [row for row in done.results if row.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED]
    assert gone.address == waiting
    assert "is gone" in gone.message
    assert (done.counts.succeeded, done.counts.skipped) == (3, 1)
    assert sorted(len(fake.effects) for fake in fakes) == [0, 1, 1, 1]
