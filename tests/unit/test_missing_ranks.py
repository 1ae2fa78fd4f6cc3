"""Ranks that never attached: known from the process that started them, told as starting and then as missing."""

from __future__ import annotations

from pathlib import Path

from engine_bridge.engine.siblings import local_ranks
from sidecar.backends.bridge.failed import ATTACH_GRACE_S, MissingEngine

PARENT = 70


class Machine:
    """A /proc of a few processes."""

    def __init__(self, root: Path) -> None:
        self.proc = root

    def runs(self, pid: int, title: bytes, parent: int = PARENT, name: bytes = b"VLLM::EngineCor") -> None:
        process = self.proc / str(pid)
        process.mkdir()
        (process / "stat").write_bytes(b"%d (%s) S %d 1 1 0 -1" % (pid, name, parent))
        (process / "cmdline").write_bytes(title)


def test_the_ranks_beside_an_engine_are_those_its_parent_started(tmp_path):
    machine = Machine(tmp_path)
    machine.runs(PARENT, b"vllm\0serve\0tiny", parent=1)
    machine.runs(71, b"VLLM::EngineCore_DP9\0\0\0")
    machine.runs(72, b"VLLM::EngineCore_DP8\0\0\0", name=b"a) S 1 (b")
    machine.runs(73, b"VLLM::EngineCore_DP3\0\0\0", parent=2)
    machine.runs(74, b"VLLM::Coordinator\0\0")
    (tmp_path / "self").mkdir()
    (tmp_path / "75").mkdir()  # ends while it is looked at
    assert local_ranks(8, PARENT, tmp_path) == (8, 9)


def test_nothing_is_claimed_where_the_own_rank_is_not_to_be_seen(tmp_path):
    machine = Machine(tmp_path)
    machine.runs(71, b"VLLM::EngineCore_DP1\0")
    machine.runs(72, b"VLLM::EngineCore\0")
    assert local_ranks(0, PARENT, tmp_path) == ()
    assert local_ranks(0, PARENT, tmp_path / "none") == ()


async def test_a_missing_rank_is_starting_for_a_while_and_then_has_no_bridge():
    now = [1000.0]
    engine = MissingEngine(3, "/run/engines", lambda: now[0])
    assert (engine.trouble.reason, engine.connected, engine.facts) == ("ENGINE_STARTING", False, None)
    assert (await engine.submit(None, 0)) == engine.trouble  # type: ignore[arg-type]
    now[0] += ATTACH_GRACE_S
    assert engine.trouble.reason == "BRIDGE_NOT_ATTACHED"
    assert "engine 3" in engine.trouble.message
    assert "/run/engines" in engine.trouble.message
