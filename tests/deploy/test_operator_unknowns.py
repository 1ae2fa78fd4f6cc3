"""An outcome that was unknown when a CacheOperation ended is asked for afterwards, and the status follows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cluster import KEEP, Cluster
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.coordinator.port import Aim, Answer, Asked, Health
from sidecar.operator import config as operator_config
from sidecar.operator import unknowns
from sidecar.operator.app import Operator
from sidecar.operator.resource import Resource, read
from sidecar.operator.unknowns import Unknowns


class Replicas:
    """Says what it is told to say of a request id."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.word = Asked(None, Answer(fleet_pb2.TargetResult(code="UNAVAILABLE")))

    async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
        self.asked.append((aim.name, request_id))
        return self.word

    async def call(self, aim: Aim, spec: fleet_pb2.OperationSpec, request_id: str, timeout_s: float) -> Answer:
        raise AssertionError("an outcome is asked for, never called for")

    async def health(self, aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        raise AssertionError("not asked for")


SUCCEEDED = Asked(True, Answer(fleet_pb2.TargetResult(outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED, code="OK")))
UNDER_WAY = Asked(True)
NEVER_HEARD = Asked(False)


def ended(minutes_ago: float) -> dict[str, Any]:
    """A status with one target of two that is not known."""
    at = (datetime.now(UTC) - timedelta(minutes=minutes_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    unknown = {"outcome": "Unknown", "code": "DEADLINE_EXCEEDED", "reason": "OUTCOME_UNKNOWN", "requestId": "id-1"}
    return {
        "phase": "Partial",
        "operationId": "op",
        "completionTime": at,
        "startTime": at,
        "counts": {"total": 2, "succeeded": 1, "failed": 0, "unknown": 1},
        "results": [
            {"replica": "p1", **unknown, "message": "no answer", "attempts": 1},
            {"replica": "p0", "outcome": "Succeeded", "code": "OK", "requestId": "id-0"},
        ],
        "ledger": {
            "p0": {"uid": "u0", "address": "127.0.0.1:1", "outcome": "Succeeded", "code": "OK", "requestId": "id-0"},
            "p1": {"uid": "u1", "address": "127.0.0.1:2", **unknown},
        },
    }


class Asking:
    """Unknowns of an operator that is not running: rounds are made by the test."""

    def __init__(self, cluster: Cluster, operator: Operator) -> None:
        self.cluster, self.replicas, self.leads = cluster, Replicas(), True
        around = replace(operator._around, leads=lambda: self.leads)
        self.metrics = around.metrics
        self.unknowns = Unknowns(around, self.replicas)

    async def put(self, status: dict[str, Any]) -> Resource:
        body = {
            "apiVersion": "kvctl.dev/v1alpha1",
            "kind": "CacheOperation",
            "metadata": {"name": "wipe"},
            "spec": KEEP,
            "status": status,
        }
        return read(await self.cluster.api.put("cacheoperations", body))

    def gauge(self) -> float:
        return next(iter(self.metrics.unknown.collect())).samples[0].value


@pytest.fixture
async def asking(cluster: Cluster) -> AsyncIterator[Asking]:
    operator = Operator(operator_config.load(["--metrics", "off"], {}), Access(cluster.api.url, "llm"))
    yield Asking(cluster, operator)
    await operator._channels.close()
    await operator._api.close()


async def test_what_becomes_known_turns_row_counts_phase_and_conditions_and_is_told(asking: Asking) -> None:
    asking.unknowns.seen(await asking.put(ended(1)))
    assert asking.gauge() == 1
    asking.replicas.word = SUCCEEDED
    await asking.unknowns.ask_all()
    status = asking.cluster.status("wipe")
    assert asking.replicas.asked == [("p1", "id-1")]
    assert status["phase"] == "Succeeded"
    assert {row["replica"]: row["outcome"] for row in status["results"]} == {"p0": "Succeeded", "p1": "Succeeded"}
    assert (status["counts"]["unknown"], status["counts"]["succeeded"]) == (0, 2)
    assert {c["type"]: c["status"] for c in status["conditions"]}["Succeeded"] == "True"
    assert status["ledger"]["p1"]["outcome"] == "Succeeded"
    assert not status["ledger"]["p1"]["reason"], "what was so before is not left behind"
    assert "p1: the outcome became known after the end" in status["warnings"][0]
    assert asking.cluster.reasons() == ["OutcomeLearned"]
    asking.unknowns.seen(read(asking.cluster.api.get("cacheoperations", "wipe")))
    assert asking.gauge() == 0


async def test_a_replica_that_never_heard_of_it_settles_it_as_not_executed(asking: Asking) -> None:
    asking.unknowns.seen(await asking.put(ended(1)))
    asking.replicas.word = NEVER_HEARD
    await asking.unknowns.ask_all()
    status = asking.cluster.status("wipe")
    assert status["phase"] == "Partial"
    assert status["counts"]["unreachable"] == 1
    assert "nothing was executed" in status["message"]


@pytest.mark.parametrize(
    "word",
    [UNDER_WAY, Asked(None, Answer(fleet_pb2.TargetResult(code="UNAVAILABLE"))), Asked(known=False, records_s=1)],
    ids=["under way", "cannot be asked", "restarted since"],
)
async def test_what_stays_unknown_is_asked_again_in_the_next_round(asking: Asking, word: Asked) -> None:
    asking.unknowns.seen(await asking.put(ended(1)))
    asking.replicas.word = word
    await asking.unknowns.ask_all()
    await asking.unknowns.ask_all()
    assert len(asking.replicas.asked) == 2
    assert asking.cluster.status("wipe")["phase"] == "Partial"
    assert asking.gauge() == 1


async def test_records_are_compared_with_the_age_that_the_call_has_when_they_are_told(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    age_s = [1.0]

    async def ask(*_: object) -> Asked:
        age_s.append(5.0)
        return Asked(known=False, records_s=3)

    monkeypatch.setattr(unknowns, "_seconds_since", lambda _: age_s[-1])
    monkeypatch.setattr(asking.replicas, "ask", ask)
    asking.unknowns.seen(await asking.put(ended(1)))
    await asking.unknowns.ask_all()
    assert age_s == [1.0, 5.0]
    assert asking.cluster.status("wipe")["ledger"]["p1"]["outcome"] == "Unknown"


async def test_nobody_is_asked_when_the_end_is_more_than_an_hour_ago(asking: Asking) -> None:
    asking.unknowns.seen(await asking.put(ended(61)))
    await asking.unknowns.ask_all()
    assert asking.replicas.asked == []


async def test_one_that_does_not_lead_asks_nobody_and_goes_on_when_it_does(asking: Asking) -> None:
    asking.leads = False
    asking.unknowns.seen(await asking.put(ended(1)))
    await asking.unknowns.ask_all()
    assert (asking.replicas.asked, asking.gauge()) == ([], 0)
    asking.leads, asking.replicas.word = True, SUCCEEDED
    await asking.unknowns.ask_all()
    assert asking.cluster.status("wipe")["phase"] == "Succeeded"


async def test_a_resource_that_was_deleted_is_not_asked_for(asking: Asking) -> None:
    resource = await asking.put(ended(1))
    asking.unknowns.seen(resource)
    asking.unknowns.gone(resource.metadata.uid)
    await asking.unknowns.ask_all()
    assert asking.replicas.asked == []


async def test_a_running_operator_learns_what_a_pod_did_whose_answer_was_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.operator.unknowns.ASK_EVERY_S", 0.1)
    fake = cluster.fakes[1]
    async with cluster.operator() as operator:
        request_id = "0b4b6b4e-3c52-4a26-9b8f-2f2f3a7f0001"
        status = ended(1)
        uid = cluster.api.get("pods", "p1")["metadata"]["uid"]
        status["ledger"]["p1"].update(requestId=request_id, address=cluster.addresses[1], uid=uid)
        answer = replica_pb2.ResetPrefixCacheResponse(request_id=request_id)
        answer.engines.add(
            status=fake.status(), cached_blocks_dropped=812
        ).prefix_cache.state = types_pb2.TIER_STATE_DONE
        fake._did("reset", request_id, answer)
        await Asking(cluster, operator).put(status)
        await cluster.api.until(lambda: cluster.status("wipe").get("phase") == "Succeeded")
        await cluster.told("OutcomeLearned")
    assert fake.effects == [request_id], "asked, and not called again"
