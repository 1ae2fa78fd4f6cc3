"""The engine socket's contract, on real engine cores: with a loop of its own, asynchronous, and in this process."""

from __future__ import annotations

import itertools

import pytest

from tests.contract.engine_contract import EngineContract
from tests.engine.conftest import VllmEngineHarness
from tests.fake_engine.client import BridgeClient

pytestmark = pytest.mark.engine

_prefixes = itertools.count()


class RealSubject:
    def __init__(self, engine: VllmEngineHarness) -> None:
        self.engine = engine
        self.socket_path = engine.sockets()[0]
        self.page_path = self.socket_path.with_suffix(".page")
        self._holding: list[str] = []

    def hold(self) -> None:
        name = self.engine.add(list(range(8, 72)), 7000)
        self._holding.append(name)
        self.engine.wait_tokens(name, 1)

    def release(self) -> None:
        if self._holding:
            self.engine.client.abort_requests(self._holding)
        self._holding = []
        with BridgeClient(self.socket_path) as client:
            while client.admission(0).blocks_free != client.welcome.blocks:  # type: ignore[union-attr]
                pass

    def warm(self) -> None:
        first = 8 + next(_prefixes) % 400
        names = [self.engine.add([first, *range(20, 100)], 2 + n) for n in range(4)]
        self.engine.wait_finished(*names)


class TestEngineCoreProcess(EngineContract):
    @pytest.fixture
    def subject(self, sync_engine: VllmEngineHarness) -> RealSubject:
        return RealSubject(sync_engine)


class TestAsynchronousEngineCoreProcess(EngineContract):
    @pytest.fixture
    def subject(self, async_engine: VllmEngineHarness) -> RealSubject:
        return RealSubject(async_engine)
