"""The end of a caller's patience: what is told then is what is known, and the same to everybody who waits."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from engine_bridge.page import PageReader, Phase
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.replica import requests
from sidecar.replica.audit import Ending
from sidecar.replica.operations import Operations
from sidecar.rpc.auth import Caller, Role
from sidecar.rpc.deadlines import Deadline
from sidecar.rpc.errors import Failure
from tests.fake_engine.process import EngineProcess, spawn_engine

Code = grpc.StatusCode
NOT_EXECUTED = (Code.DEADLINE_EXCEEDED, "NOT_EXECUTED")
LIMIT_S = 60


class Records:
    """In place of the audit log and the metrics."""

    def __init__(self) -> None:
        self.begun = 0
        self.endings: list[Ending] = []

    def begin(self, *_: Any) -> None:
        self.begun += 1

    def ended(self, _caller: Caller, _peer: str, _operation: str, _id: str, ending: Ending, _took_s: float) -> None:
        self.endings.append(ending)

    def operation(self, *_: Any) -> None: ...

    def engine_pause(self, *_: Any) -> None: ...


class Replica:
    def __init__(
        self, engine: EngineProcess, operations: Operations, records: Records, others: list[EngineProcess]
    ) -> None:
        self.engine = engine
        self.others = others
        self.operations = operations
        self.records = records

    async def pause(self, deadline: Deadline) -> tuple[Code, str]:
        return await self._run(api.PauseSchedulingRequest(lease={"seconds": 60}), deadline)

    async def reset(self, deadline: Deadline, request_id: str = "") -> tuple[Code, str]:
        request = api.ResetPrefixCacheRequest(running_requests=types.RUNNING_REQUESTS_KEEP, request_id=request_id)
        return await self._run(request, deadline)

    async def _run(self, request: requests.MutatingRequest, deadline: Deadline) -> tuple[Code, str]:
        try:
            async with asyncio.timeout(LIMIT_S):
                told = await self.operations.run(requests.read(request), deadline, Caller("local", Role.ADMIN), "")
        except Failure as error:
            return error.code, error.reason
        return told.code, told.reason

    def effects(self) -> int:
        return len([effect for effect in self.engine.do("state")["effects"] if effect["effect"] == "reset"])


async def serving(engine: EngineProcess) -> None:
    """Until its page says that it has started; nothing is sent to it."""
    reader = PageReader(engine.page_path)
    async with asyncio.timeout(LIMIT_S):
        while reader.read().counters.phase == Phase.STARTING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    reader.close()


@asynccontextmanager
async def replica(directory: Path, *, ranks: int = 1, met: bool = True) -> AsyncIterator[Replica]:
    """`met`: the engine has introduced itself; else it was stopped before it could."""
    records = Records()
    with contextlib.ExitStack() as started:
        engine, *others = [
            started.enter_context(spawn_engine(directory, "--rank", str(rank), "--dp-size", str(ranks)))
            for rank in range(ranks)
        ]
        engines = EngineDirectory(directory)
        news = asyncio.Event()
        engines.on_change(news.set)
        if not met:
            await serving(engine)
            engine.freeze()
        await engines.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                while met and not all(each.connected for each in engines.engines()):
                    news.clear()
                    await news.wait()
            yield Replica(engine, Operations(engines, records, records), records, others)  # type: ignore[arg-type]
        finally:
            engine.thaw()
            await engines.close()


@pytest.mark.parametrize("budget_s", [0.0, 0.001, 0.015, 0.05])
async def test_a_budget_too_short_for_a_stopped_engine_is_not_executed_and_not_unknown(tmp_path, budget_s):
    async with replica(tmp_path) as here:
        here.engine.freeze()
        assert await here.reset(Deadline.after(budget_s)) == NOT_EXECUTED
        assert [(ending.code, ending.reason) for ending in here.records.endings] == (
            [("DEADLINE_EXCEEDED", "NOT_EXECUTED")] * here.records.begun
        )
        here.engine.thaw()
        assert (await here.reset(Deadline.after(LIMIT_S)))[0] is Code.OK
        assert here.effects() == 1


async def test_a_joiner_whose_deadline_comes_a_moment_before_hears_what_goes_on_record(tmp_path):
    async with replica(tmp_path) as here:
        here.engine.freeze()
        request_id = str(uuid.uuid4())
        first, joiner = Deadline.after(1.0), Deadline.after(0.98)
        told = await asyncio.gather(here.reset(first, request_id), here.reset(joiner, request_id))
        assert told == [NOT_EXECUTED, NOT_EXECUTED]
        assert here.records.begun == 1
        assert [ending.reason for ending in here.records.endings] == ["NOT_EXECUTED"]


async def test_what_had_started_is_unknown_to_every_one_who_waits(tmp_path):
    async with replica(tmp_path) as here:
        here.engine.do("hold_at", point="before_effect")
        request_id = str(uuid.uuid4())
        first, joiner = Deadline.after(3.0), Deadline.after(2.98)
        told = await asyncio.gather(here.reset(first, request_id), here.reset(joiner, request_id))
        assert told == [(Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")] * 2
        here.engine.do("let_go")


async def test_an_operation_that_was_never_sent_is_not_executed_when_the_sidecar_stops(tmp_path):
    async with replica(tmp_path, met=False) as here:
        waiting = asyncio.create_task(here.reset(Deadline.after(LIMIT_S)))
        async with asyncio.timeout(LIMIT_S):
            while not here.records.begun:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await here.operations.stop(0.5)
        assert await waiting == NOT_EXECUTED


async def test_an_operation_under_way_when_the_sidecar_stops_is_on_record_as_unknown(tmp_path):
    async with replica(tmp_path) as here:
        here.engine.do("hold_at", point="before_effect")
        waiting = asyncio.create_task(here.reset(Deadline.after(LIMIT_S)))
        await asyncio.to_thread(here.engine.do, "wait_held")
        await here.operations.stop(0.5)
        assert await waiting == (Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
        assert [ending.reason for ending in here.records.endings] == ["OUTCOME_UNKNOWN"]
        here.engine.do("let_go")


async def test_a_pause_under_way_when_the_sidecar_stops_is_undone_where_it_holds_and_costs_no_cache(tmp_path):
    async with replica(tmp_path, ranks=2) as here:
        before = here.engine.do("state")
        (other,) = here.others
        other.freeze()
        try:
            waiting = asyncio.create_task(here.pause(Deadline.after(LIMIT_S)))
            async with asyncio.timeout(LIMIT_S):
                while not (await asyncio.to_thread(here.engine.do, "state"))["paused"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await here.operations.stop(0.5)
            assert await waiting == (Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
        finally:
            other.thaw()
        after = here.engine.do("state")
        assert (after["paused"], after["cached_blocks"]) == ("", before["cached_blocks"])
        assert before["cached_blocks"] > 0
