"""The two things that exactly-once rests on between operators: who may act, and what is on record when."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import yaml
from apiserver import CRD, ApiServer, Refused, serving
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.coordinator.discovery.kube_api import Api
from sidecar.coordinator.port import JournalError
from sidecar.operator import status
from sidecar.operator.ended import EndedTargets
from sidecar.operator.journal import ResourceJournal, StatusWriter
from sidecar.operator.lease import Election, Timing
from sidecar.operator.resource import Entry, Resource, Row, read

TIMING = Timing(15.0, 10.0, 2.0)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def client(api: ApiServer) -> AsyncIterator[Api]:
    client = Api(Access(api.url, "llm"))
    yield client
    await client.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def candidate(client: Api, name: str, clock: Clock) -> Election:
    return Election(client, "llm", "lease", name, TIMING, clock=clock)


# --- lease -----------------------------------------------------------------------------------------------------------


async def test_a_lease_that_is_renewed_is_not_taken_over(client: Api) -> None:
    mine, theirs = Clock(), Clock()
    first, second = candidate(client, "a", mine), candidate(client, "b", theirs)
    assert await first.attempt()
    for _ in range(20):
        mine.now += 2
        theirs.now += 2
        assert await first.attempt()
        assert not await second.attempt()


async def test_a_lease_of_a_dead_leader_is_taken_over_after_its_whole_duration_and_not_before(client: Api) -> None:
    clock = Clock()
    first, second = candidate(client, "a", clock), candidate(client, "b", clock)
    assert await first.attempt()
    assert not await second.attempt()
    clock.now += 14.9
    assert not await second.attempt()
    clock.now += 0.2
    assert await second.attempt()


async def test_a_wall_clock_that_is_hours_off_changes_nothing(client: Api, api: ApiServer) -> None:
    clock = Clock()
    assert await candidate(client, "a", clock).attempt()
    api.get("leases", "lease")["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await candidate(client, "b", clock).attempt()


async def test_a_leader_gives_up_before_another_may_begin(client: Api, api: ApiServer) -> None:
    clock = Clock()
    first, second = candidate(client, "a", clock), candidate(client, "b", clock)
    assert await first.attempt()
    assert not await second.attempt()

    async def away(_method: str, _path: str) -> None:
        raise Refused(503, "ServiceUnavailable", "away")

    api.faults = away
    clock.now += 9.9
    assert await first.attempt()
    clock.now += 0.2
    assert not await first.attempt()
    api.faults = None
    assert not await second.attempt()


async def test_of_two_that_reach_for_an_expired_lease_one_gets_it(client: Api) -> None:
    clock = Clock()
    dead, second, third = (candidate(client, name, clock) for name in "abc")
    assert await dead.attempt()
    assert not await second.attempt()
    assert not await third.attempt()
    clock.now += 16
    assert sorted(await asyncio.gather(second.attempt(), third.attempt())) == [False, True]


async def test_a_leader_that_stops_gives_the_lease_back(client: Api) -> None:
    clock = Clock()
    first, second = candidate(client, "a", clock), candidate(client, "b", clock)
    started = asyncio.Event()
    stopped: list[str] = []

    async def start() -> None:
        started.set()

    async def stop() -> None:
        stopped.append("a")

    task = asyncio.create_task(first.run(start, stop))
    await asyncio.wait_for(started.wait(), 5)
    assert not await second.attempt()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert stopped == ["a"]
    assert await second.attempt()


# --- journal ---------------------------------------------------------------------------------------------------------

SPEC = {"reset": {}, "targets": {"all": True}}


async def resource(api: ApiServer) -> Resource:
    await api.create("cacheoperations", {"metadata": {"name": "wipe"}, "spec": SPEC})
    return read(api.get("cacheoperations", "wipe"))


async def test_a_resource_made_anew_under_the_same_name_is_not_written_to(api: ApiServer, client: Api) -> None:
    writer = StatusWriter(client, await resource(api), lambda: True)
    await api.remove("cacheoperations", "wipe")
    await resource(api)
    with pytest.raises(JournalError, match="another one has its name"):
        await writer.write({"phase": "Running"})
    assert "status" not in api.get("cacheoperations", "wipe")
    with pytest.raises(JournalError, match="deleted"):
        await writer.write({"phase": "Running"})


async def test_what_others_change_meanwhile_does_not_keep_a_write_back(api: ApiServer, client: Api) -> None:
    writer = StatusWriter(client, await resource(api), lambda: True)
    await api.merge("cacheoperations", "wipe", {"spec": {"suspend": True}})
    await writer.write({"phase": "Suspended"})
    stored = api.get("cacheoperations", "wipe")
    assert (stored["spec"]["suspend"], stored["status"]["phase"]) == (True, "Suspended")


async def test_who_no_longer_leads_writes_nothing(api: ApiServer, client: Api) -> None:
    writer = StatusWriter(client, await resource(api), lambda: False)
    with pytest.raises(JournalError, match="no longer leads"):
        await writer.write({"phase": "Running"})
    assert not api.writes


async def test_many_intents_at_once_are_few_writes_and_each_is_on_record_when_it_returns(
    api: ApiServer, client: Api
) -> None:
    names = [f"p{number}" for number in range(200)]
    writer = StatusWriter(client, await resource(api), lambda: True)
    journal = ResourceJournal(writer, {name: Entry(f"uid-{name}", "10.0.0.1:1") for name in names}, {})

    async def one(name: str) -> None:
        await journal.intent(name, f"id-{name}", 0)
        assert api.get("cacheoperations", "wipe")["status"]["ledger"][name]["requestId"] == f"id-{name}"

    await asyncio.gather(*(one(name) for name in names))
    assert len(api.writes) < 10


async def test_a_write_that_fails_tells_everyone_who_waited_for_it(api: ApiServer, client: Api) -> None:
    writer = StatusWriter(client, await resource(api), lambda: True)

    async def full(_method: str, _path: str) -> None:
        raise Refused(500, "InternalError", "etcdserver: mvcc: database space exceeded")

    api.faults = full
    answers = await asyncio.gather(*(writer.write({"message": str(n)}) for n in range(3)), return_exceptions=True)
    assert all(isinstance(answer, JournalError) and "space exceeded" in str(answer) for answer in answers)
    api.faults = None
    await writer.write({"message": "again"})
    assert api.get("cacheoperations", "wipe")["status"]["message"] == "again"


# --- status ----------------------------------------------------------------------------------------------------------


def outcome(replica: str, word: str = "SUCCEEDED") -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(replica=replica, outcome=fleet_pb2.TargetOutcome.Value(f"TARGET_OUTCOME_{word}"))


def test_results_are_bounded_and_what_went_wrong_comes_first() -> None:
    ended = EndedTargets(600)
    for result in [*(outcome(f"p{n:04}") for n in range(500)), outcome("lost", "UNKNOWN"), outcome("bad", "FAILED")]:
        ended.put(result, "uid")
    patch: dict[str, Any] = ended.patch()
    assert len(patch["results"]) == status.MAX_RESULTS
    assert [row["replica"] for row in patch["results"][:3]] == ["bad", "lost", "p0000"]
    assert patch["resultsOmitted"] == 502 - status.MAX_RESULTS
    assert patch["progress"] == "502/600"
    counts = {"total": 600, "succeeded": 500, "failed": 1, "unknown": 1}
    assert patch["counts"] == {**counts, "unreachable": 0, "skipped": 0, "cancelled": 0}


def test_a_target_that_is_known_better_afterwards_has_one_row_and_counts_once() -> None:
    ended = EndedTargets(2)
    for result in (outcome("p0", "UNKNOWN"), outcome("p1"), outcome("p0")):
        ended.put(result, "uid")
    patch: dict[str, Any] = ended.patch()
    assert [(row["replica"], row["outcome"]) for row in patch["results"]] == [("p0", "Succeeded"), ("p1", "Succeeded")]
    assert (patch["counts"]["succeeded"], patch["counts"]["unknown"]) == (2, 0)
    assert patch["progress"] == "2/2"


async def test_recording_an_end_costs_one_row_however_many_have_ended_before(
    api: ApiServer, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(result: fleet_pb2.TargetResult, uid: str) -> Row:
        made.append(result.replica)
        return shown(result, uid)

    shown = status.shown
    monkeypatch.setattr(status, "shown", counted)
    names = [f"p{number}" for number in range(300)]
    journal = ResourceJournal(
        StatusWriter(client, await resource(api), lambda: True), {name: Entry(f"uid-{name}") for name in names}, {}
    )
    await asyncio.gather(*(journal.result(outcome(name)) for name in names))
    assert len(made) == len(names)
    assert api.get("cacheoperations", "wipe")["status"]["counts"]["succeeded"] == 300


def test_the_largest_operation_of_which_nothing_succeeded_fits_into_etcd() -> None:
    name = "vllm-with-a-name-as-long-as-a-host-name-may-be-{:04}-abcdefghijk"
    assert len(name.format(0)) == 63
    results = {
        name.format(n): fleet_pb2.TargetResult(
            replica=name.format(n),
            outcome=fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
            address="[fd00:10:244:1000:1000:1000:1000:1000]:7700",
            code="DEADLINE_EXCEEDED",
            reason="TARGETED_REQUEST_ID_REUSED",
            message="x" * 5000,
            request_id=str(uuid.uuid4()),
            wave=n,
            attempts=4,
        )
        for n in range(status.MAX_TARGETS)
    }
    ledger = {name: status.entry_of(row, str(uuid.uuid4())) for name, row in results.items()}
    size = len(msgspec.json.encode({"ledger": ledger, **EndedTargets.of(ledger, results.values()).patch()}))
    assert size < 1.1e6, "etcd takes 1.5 MB; the spec, the conditions and managedFields need room as well"
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    kept = schema["properties"]["status"]["properties"]["ledger"]
    assert kept["x-kubernetes-map-type"] == "atomic", "or managedFields has entries for each target"


def test_a_long_message_is_cut_and_not_dropped() -> None:
    row = fleet_pb2.TargetResult(replica="p0", outcome=fleet_pb2.TARGET_OUTCOME_FAILED, message="ä" * 5000)
    shown = status.shown(row, "uid")
    assert len(shown.message) == status.MAX_MESSAGE
    assert shown.message.endswith("…")


def test_what_the_ledger_keeps_is_enough_to_resume() -> None:
    ledger = {
        "done": Entry("u1", "a:1", 0, "id-1", "Succeeded", "OK"),
        "called": Entry("u2", "a:2", 1, "id-2"),
        "planned": Entry("u3", "a:3"),
        "apart": Entry("", "a:4", 0, "", "Skipped", "CANCELLED", "TARGET_NOT_READY"),
    }
    found = status.recorded(ledger, [Row("done", "Succeeded", message="fine", attempts=2)])
    assert set(found) == {"done", "called", "apart"}
    assert found["done"].result is not None
    assert found["done"].result.attempts == 2
    assert found["called"].result is None
    assert (found["called"].request_id, found["called"].wave) == ("id-2", 1)
    assert found["apart"].result is not None
    assert found["apart"].result.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED
    assert not found["apart"].request_id


@pytest.mark.parametrize(
    ("outcomes", "incomplete", "phase"),
    [
        (["SUCCEEDED", "SUCCEEDED"], False, "Succeeded"),
        (["SUCCEEDED", "SUCCEEDED"], True, "Partial"),
        (["SUCCEEDED", "UNKNOWN"], False, "Partial"),
        (["FAILED", "UNREACHABLE"], False, "Failed"),
        (["SUCCEEDED", "CANCELLED"], False, "Cancelled"),
    ],
)
def test_the_phase_never_claims_more_than_happened(outcomes: list[str], incomplete: bool, phase: str) -> None:
    rows = [fleet_pb2.TargetResult(outcome=fleet_pb2.TargetOutcome.Value(f"TARGET_OUTCOME_{o}")) for o in outcomes]
    assert status.final_phase(rows, incomplete=incomplete) == phase
