"""An operation that was stopped by a full disk, and a coordinator that is killed before there is room again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.store import Store
from tests.contract.coordinator_in_process import coordinator, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar, serving

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
SKIPPED = fleet_pb2.TARGET_OUTCOME_SKIPPED


class Disk:
    """What the store is on. Full, it takes no write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = asyncio.Event()
        for method in ("intent", "result", "update"):
            monkeypatch.setattr(Store, method, self._unless_full(getattr(Store, method)))

    def _unless_full(self, write: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def writing(*given: object, **named: object) -> None:
            if self.full.is_set():
                raise StoreError("the store cannot be written (disk is full); free space on that disk, then try again")
            await write(*given, **named)

        return writing

    def fills_when_called(self, fake: FakeSidecar) -> None:
        """Full from the call of this replica on."""

        async def fill(_: str) -> None:
            self.full.set()

        fake.before = fill


async def test_what_was_told_as_not_called_is_not_called_by_the_coordinator_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]
    disk.fills_when_called(fakes[0])
    async with serving(*fakes) as addresses:
        targets = [f"{fake.name}={address}" for fake, address in zip(fakes, addresses, strict=True)]
        async with coordinator(tmp_path, targets) as it:
            told = await it.run(keep_reset(concurrency=1))
            assert [row.outcome for row in told.results] == [SUCCEEDED, SKIPPED, SKIPPED]
            # Its end cannot be recorded: leaving now is as a kill would be.
        disk.full.clear()
        async with coordinator(tmp_path, targets) as again:
            ended = await again.ended(told.operation_id)
        assert [row.outcome for row in ended.results] == [SUCCEEDED, SKIPPED, SKIPPED]
        assert ended.state == told.state == fleet_pb2.OPERATION_STATE_PARTIAL
        assert [len(fake.effects) for fake in fakes] == [1, 0, 0]
        async with coordinator(tmp_path, targets) as later:
            after = keep_reset()
            assert (await later.run(after)).state == fleet_pb2.OPERATION_STATE_SUCCEEDED, "others are not stopped by it"
            assert later.app._store.stopped.ids() == []


async def test_an_operation_that_went_on_to_its_end_when_there_was_room_again_leaves_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.coordinator.running._FLUSH_EVERY_S", 0.05)
    disk = Disk(monkeypatch)
    fakes = [FakeSidecar(f"r{i}") for i in range(2)]
    disk.fills_when_called(fakes[0])
    async with serving(*fakes) as addresses:
        targets = [f"{fake.name}={address}" for fake, address in zip(fakes, addresses, strict=True)]
        async with coordinator(tmp_path, targets) as it:
            told = await it.run(keep_reset(concurrency=1))
            assert it.app._store.stopped.ids() == [told.operation_id]
            disk.full.clear()
            async with asyncio.timeout(60):
                while it.app._store.stopped.ids():  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.01)
        async with coordinator(tmp_path, targets) as again:
            assert await again.get(told.operation_id) is not None
    assert [len(fake.effects) for fake in fakes] == [1, 0]
