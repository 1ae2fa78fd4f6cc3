"""Replicas and a journal in memory, for operations under fake time: what `port` asks of the world.

The replicas keep the contract: one effect a request id, and the recorded result for a repeat.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator.execution import Execution
from sidecar.coordinator.port import Aim, Answer, Asked, Health, JournalError, Recorded
from tests import fake_time

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
FAILED = fleet_pb2.TARGET_OUTCOME_FAILED
UNREACHABLE = fleet_pb2.TARGET_OUTCOME_UNREACHABLE
UNKNOWN = fleet_pb2.TARGET_OUTCOME_UNKNOWN
SKIPPED = fleet_pb2.TARGET_OUTCOME_SKIPPED
CANCELLED = fleet_pb2.TARGET_OUTCOME_CANCELLED
OPERATION = "7f3f3cf6-5a0c-4f9e-9a39-3a8a36b1c001"


def answer(
    outcome: int = SUCCEEDED, code: str = "OK", reason: str = "", execution: int = 0, retry: float = 0
) -> Answer:
    row = fleet_pb2.TargetResult(outcome=outcome, code=code, reason=reason, execution=execution)  # type: ignore[arg-type]
    return Answer(row, retry)


class FakeFleet:
    """Replicas that keep the contract: one effect a request id, the recorded result for a repeat."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        """By replica."""
        self.by_id: dict[str, Answer] = {}
        self.calls: list[tuple[float, str, str]] = []
        self.asked: list[str] = []
        self.script: dict[str, list[Answer | str]] = {}
        """What a replica does at its next calls: an answer, "lost" (effect, no answer), "hole" (nothing)."""
        self.took = 0.1
        self.under_way: set[str] = set()
        self.most_under_way = 0
        self.ill: dict[str, str] = {}
        self.cannot_ask: set[str] = set()

    async def identify(self, aim: Aim, timeout_s: float) -> str | Answer:
        return aim.identity or aim.name

    async def call(self, aim: Aim, spec: fleet_pb2.OperationSpec, request_id: str, timeout_s: float) -> Answer:
        self.calls.append((now(), aim.name, request_id))
        self.under_way.add(aim.name)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            return await self._call(aim, request_id, timeout_s)
        finally:
            self.under_way.discard(aim.name)

    async def _call(self, aim: Aim, request_id: str, timeout_s: float) -> Answer:
        steps = self.script.get(aim.name, [])
        step = steps.pop(0) if steps else answer()
        if step == "hole":
            await asyncio.sleep(timeout_s)
            return answer(UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE", types_pb2.EXECUTION_NOT_EXECUTED)
        await asyncio.sleep(self.took)
        if request_id in self.by_id:
            return self.by_id[request_id]
        if step == "lost":
            self.effects[aim.name] += 1
            self.by_id[request_id] = answer()
            await asyncio.sleep(max(0.0, timeout_s - self.took))
            return answer(UNKNOWN, "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", types_pb2.EXECUTION_UNKNOWN)
        assert isinstance(step, Answer)
        if step.result.code == "OK":
            self.effects[aim.name] += 1
        if step.result.code in ("OK", "FAILED_PRECONDITION"):
            self.by_id[request_id] = step
        return step

    async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
        self.asked.append(aim.name)
        await asyncio.sleep(0.01)
        if aim.name in self.cannot_ask:
            return Asked(None, answer(UNREACHABLE, "UNAVAILABLE"))
        known = self.by_id.get(request_id)
        return Asked(True, known) if known else Asked(False)

    async def health(self, aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        await asyncio.sleep(0.01)
        why = self.ill.get(aim.name, "")
        return Health(not why, why)


class FakeDisk:
    """A journal that survives the run that wrote it."""

    def __init__(self) -> None:
        self.intents: dict[str, tuple[str, int]] = {}
        self.results: dict[str, fleet_pb2.TargetResult] = {}
        self.unhealthy_: dict[str, str] = {}
        self.full_after: int | None = None
        self.writes = 0

    async def _write(self) -> None:
        self.writes += 1
        await asyncio.sleep(0.005)
        if self.full_after is not None and self.writes > self.full_after:
            raise JournalError("the disk is full")

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        await self._write()
        self.intents[target] = (request_id, wave)

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        await self._write()
        self.results[result.replica] = fleet_pb2.TargetResult.FromString(result.SerializeToString())

    async def unhealthy(self, target: str, why: str) -> None:
        await self._write()
        self.unhealthy_[target] = why

    def recorded(self) -> dict[str, Recorded]:
        names = self.intents.keys() | self.results.keys()
        return {
            name: Recorded(*self.intents.get(name, ("", 0)), self.results.get(name), self.unhealthy_.get(name, ""))
            for name in names
        }


def now() -> float:
    return asyncio.get_running_loop().time()


def aims(count: int) -> list[Aim]:
    return [Aim(f"r{index}", f"10.0.0.{index}:7700") for index in range(count)]


def reset(**rollout: object) -> fleet_pb2.OperationSpec:
    spec = fleet_pb2.OperationSpec()
    spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    spec.timeout.seconds = 30
    spec.rollout.CopyFrom(fleet_pb2.Rollout(**rollout))  # type: ignore[arg-type]
    return spec


ROLLING = fleet_pb2.ROLLOUT_STRATEGY_ROLLING


def run(fleet: FakeFleet, count: int = 3, spec: fleet_pb2.OperationSpec | None = None, **more: object):
    async def work():
        execution = Execution(OPERATION, spec or reset(), aims(count), fleet, **more)  # type: ignore[arg-type]
        began = now()
        results = await execution.run()
        return results, now() - began, execution

    return fake_time.run(work())
