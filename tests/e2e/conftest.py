"""A real fleet: two vLLM replicas on the CPU with a sidecar each, booted by `kvctl local up` as a person would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sidecar.local.load import Load
from tests.e2e.fleet_program import BOOT_SECONDS, Kvctl, left_behind


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)
            # The first test that needs the shared fleet waits for it to boot.
            item.add_marker(pytest.mark.timeout(BOOT_SECONDS + 200))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def fleet(home: Path) -> Iterator[Kvctl]:
    """The fleet that every test shares which does it no lasting harm."""
    kvctl = Kvctl(home)
    try:
        booted = kvctl.run("local", "up", "--replicas", "2", timeout=BOOT_SECONDS)
        assert booted.code == 0, booted.err
        directory = kvctl.fleet.directory
        yield kvctl
    finally:
        ended = kvctl.run("local", "down")
    assert ended.code == 0, ended.err
    assert left_behind(kvctl, directory) == []


@pytest.fixture
async def load(fleet: Kvctl) -> AsyncIterator[list[Load]]:
    """Streams under way on both replicas."""
    loads = [Load(replica.api) for replica in fleet.fleet.replicas]
    for each in loads:
        each.start()
    await asyncio.gather(*(each.wait_midstream() for each in loads))
    yield loads
    await asyncio.gather(*(each.stop() for each in loads))


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Kvctl]:
    """kvctl with nothing up, and nothing left up however the test ends."""
    kvctl = Kvctl(tmp_path)
    yield kvctl
    for process in kvctl.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    kvctl.run("local", "down")
