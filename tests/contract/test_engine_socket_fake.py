"""The engine socket's contract, on the fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engine_contract import EngineContract
from tests.fake_engine import FakeLoop, running_engine


class FakeSubject:
    def __init__(self, loop: FakeLoop) -> None:
        self.loop = loop
        self.socket_path = loop.socket_path
        self.page_path = loop.page_path

    def hold(self) -> None:
        assert self.loop.do("hold", requests=1, blocks=3)["ok"]

    def release(self) -> None:
        assert self.loop.do("release")["ok"]

    def warm(self) -> None:
        assert self.loop.do("cache", blocks=10)["ok"]
        assert self.loop.do("scramble")["ok"]


@pytest.fixture
def subject(tmp_path: Path):
    with running_engine(tmp_path) as loop:
        yield FakeSubject(loop)


class TestFakeEngineSocket(EngineContract):
    pass
