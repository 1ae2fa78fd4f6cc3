"""A rolling reset over real engines under load whose coordinator is killed in the middle."""

from __future__ import annotations

import asyncio
import re
import urllib.request

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.local.load import finish
from tests.robustness.coordinator_process import CoordinatorProcess, get

ENDED = (4, 5, 6, 7)
SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED


def resets(fleet) -> list[float]:
    """Keep resets that each replica's sidecar has had an engine do, by its own metrics."""
    found = []
    for replica in fleet.fleet.replicas:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        body = opener.open(f"http://{replica.metrics}/metrics", timeout=10).read().decode()
        series = re.findall(r"^kvctl_operations_total\{([^}]*)\} (\S+)$", body, re.MULTILINE)
        found.append(sum(float(v) for labels, v in series if 'operation="reset"' in labels and 'mode="keep"' in labels))
    return found


async def test_a_rolling_keep_reset_survives_its_coordinator_and_interrupts_no_stream(fleet, load, tmp_path):
    inventory = fleet.state / "inventory.yaml"
    spec = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True))
    spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    spec.rollout.strategy = fleet_pb2.ROLLOUT_STRATEGY_ROLLING
    spec.rollout.min_healthy_time.seconds = 2
    spec.timeout.seconds = 120
    before = await asyncio.to_thread(resets, fleet)
    streams = [stream for each in load for stream in each.under_way()]
    lives = []

    def live() -> CoordinatorProcess:
        lives.append(CoordinatorProcess(tmp_path, [], "--inventory", str(inventory)))
        return lives[-1]

    def start_and_kill_after_the_first_replica() -> str:
        first = live()
        stub = first.serve()
        started = stub.StartOperation(fleet_pb2.StartOperationRequest(spec=spec), timeout=60).operation
        request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id)
        for message in stub.WatchOperation(request, timeout=150):
            if message.operation.counts.succeeded:
                break
        first.end()
        return started.operation_id

    def finish_with_another(operation_id: str) -> fleet_pb2.FleetOperation:
        stub = live().serve()
        request = fleet_pb2.WatchOperationRequest(operation_id=operation_id)
        for _ in stub.WatchOperation(request, timeout=150):
            pass
        return get(stub, operation_id)

    try:
        operation_id = await asyncio.to_thread(start_and_kill_after_the_first_replica)
        ended = await asyncio.to_thread(finish_with_another, operation_id)
    finally:
        for each in lives:
            each.end()
    assert ended.state in ENDED
    assert [(row.replica, row.outcome, row.wave) for row in ended.results] == [
        ("r0", SUCCEEDED, 0),
        ("r1", SUCCEEDED, 1),
    ]
    assert all(row.reset.engines[0].cached_blocks_dropped > 0 for row in ended.results)
    after = await asyncio.to_thread(resets, fleet)
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1], "one reset a replica"
    await finish(streams)
    assert all(stream.finished for stream in streams), [stream.error for stream in streams]
