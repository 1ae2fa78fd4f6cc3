"""Weight updates over a real sidecar and fake engines: what an abandoned one leaves behind, and what comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import client
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess, spawn_engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[SidecarProcess, EngineProcess]]:
    (tmp_path / "engines").mkdir()
    with spawn_engine(tmp_path / "engines") as engine:
        sidecar = SidecarProcess(tmp_path / "engines", tmp_path)
        try:
            sidecar.wait_ready(60)
            yield sidecar, engine
        finally:
            sidecar.end()


class HalfWrittenError(Exception):
    """Raised by the body of an update."""


def test_a_raised_body_leaves_its_replica_paused_at_once_and_the_next_update_is_accepted(
    served: tuple[SidecarProcess, EngineProcess],
) -> None:
    sidecar, _ = served
    with client.Fleet([sidecar.address]) as fleet:
        for _ in range(3):
            with pytest.raises(HalfWrittenError), fleet.weight_update("step-1", lease_s=600.0, require_all=True):
                raise HalfWrittenError

        def told() -> bool:
            [replica] = fleet.admission()
            return "weight update was abandoned" in replica.engines[0].explanation

        wait_until(told, 60, lambda: fleet.admission())
        [replica] = fleet.admission()
        assert "ran out" not in replica.engines[0].explanation
        with fleet.weight_update("step-2", require_all=True) as update:
            assert len(update.replicas) == 1
        update.raise_for_failures()

        def goes_on() -> bool:
            return fleet.admission()[0].engines[0].verdict == "IDLE"

        wait_until(goes_on, 60, lambda: fleet.admission())


def test_a_raised_body_lets_its_replica_go_on_where_the_caller_chose_that(
    served: tuple[SidecarProcess, EngineProcess],
) -> None:
    sidecar, engine = served
    with client.Fleet([sidecar.address]) as fleet:
        with pytest.raises(HalfWrittenError), fleet.weight_update(lease_s=600.0, on_abandon="resume", require_all=True):
            raise HalfWrittenError
        assert engine.do("state")["paused"] == ""
