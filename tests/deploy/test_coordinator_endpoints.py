"""A coordinator that finds its replicas by the EndpointSlices of a service, kept current by a watch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from apiserver import serving as api_serving
from kvctl.v1 import fleet_pb2

from tests.contract.coordinator_in_process import coordinator, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar, serving


def a_slice(*addresses: str) -> dict[str, object]:
    """One slice a replica: fakes share 127.0.0.1 and differ by port."""
    host, _, port = addresses[0].rpartition(":")
    name = f"vllm-{port}"
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm-kvctl"}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": True},
                "targetRef": {"kind": "Pod", "name": name, "uid": name},
            }
        ],
        "ports": [{"name": "kvctl", "port": int(port)}],
    }


async def test_a_scale_up_is_seen_by_the_next_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [FakeSidecar("a"), FakeSidecar("b")]
    async with api_serving() as api, serving(*fakes) as addresses:
        config = tmp_path / "kubeconfig"
        config.write_text(
            f"current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u, namespace: llm}}}}]\n"
            f"clusters: [{{name: c, cluster: {{server: '{api.url}'}}}}]\nusers: [{{name: u, user: {{}}}}]\n"
        )
        monkeypatch.setenv("KUBECONFIG", str(config))
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
