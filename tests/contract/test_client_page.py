"""docs/python.md and README: every block runs, and what they say of results, exceptions and arguments is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_sidecar_server import FakeSidecar, refused
from kvctl.v1 import replica_pb2
from test_cli_commands import environment, fleet

from sidecar.client import errors, weights
from sidecar.client.errors import KvctlError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = PYTHON.findall(PAGE)


def run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *fakes: FakeSidecar) -> list[object]:
    """Run a block beside an inventory of fakes; returns what it pushed weights to."""
    pushed: list[object] = []
    with fleet(tmp_path, *fakes):
        monkeypatch.chdir(tmp_path)
        exec(compile(block, "docs/python.md", "exec"), {"push_weights": lambda found: pushed.append(dict(found))})
    return pushed


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fakes = [FakeSidecar("r0", {"pool": "a"}), FakeSidecar("r1", {"pool": "b"})]
    run(BLOCKS[number], tmp_path, monkeypatch, *fakes)


def test_the_block_of_the_readme_pushes_to_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = PYTHON.findall((ROOT / "README.md").read_text())
    [pushed] = run(block, tmp_path, monkeypatch, FakeSidecar("r0"), FakeSidecar("r1"))
    assert set(pushed) == {"r0", "r1"}  # type: ignore[call-overload]


def test_three_lines_reset_every_replica_and_quarantine_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    run(BLOCKS[0], tmp_path, monkeypatch, *fakes)
    for fake in fakes:
        [request] = fake.requests
        assert isinstance(request, replica_pb2.ResetPrefixCacheRequest)
        assert request.quarantine_running


def test_the_block_of_a_weight_update_pushes_to_every_replica_and_records_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    [block] = [block for block in BLOCKS if "weight_update(" in block]
    [pushed] = run(block, tmp_path, monkeypatch, *fakes)
    assert set(pushed) == {"r0", "r1"}  # type: ignore[call-overload]
    for fake in fakes:
        kinds = [type(request).__name__ for request in fake.requests]
        assert kinds == ["PauseSchedulingRequest", "ResetPrefixCacheRequest", "ResumeSchedulingRequest"]
        assert fake.requests[-1].weight_version == "step-12"  # type: ignore[attr-defined]


def test_the_block_that_tells_failures_apart_names_who_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = FakeSidecar("r0")
    busy.fail_with = [refused()]
    run(BLOCKS[-1], tmp_path, monkeypatch, busy, FakeSidecar("r1"))
    assert capsys.readouterr().out == "r0 is busy: BLOCKS_HELD_BY_REQUESTS\n"


def test_the_example_of_a_training_loop_runs_and_leaves_out_who_is_lost(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    with fleet(tmp_path, *fakes, extra="- {name: gone, address: '127.0.0.1:1'}\n") as inventory:
        script = ROOT / "docs" / "examples" / "weight_update_loop.py"
        done = subprocess.run(
            [sys.executable, str(script), "--inventory", str(inventory), "--steps", "2"],
            capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("transferring to r0, r1\n") == 2
    assert "step 1: gone is left out: " in done.stderr
    for fake in fakes:
        kinds = [type(request).__name__ for request in fake.requests]
        assert kinds == ["PauseSchedulingRequest", "ResetPrefixCacheRequest", "ResumeSchedulingRequest"] * 2
        assert fake.requests[-1].weight_version == "step-2"  # type: ignore[attr-defined]


def test_the_tree_on_the_page_is_the_tree_of_exceptions() -> None:
    drawn = set(re.findall(r"^(?:[|` ]*-- )?([A-Z][A-Za-z]+)  ", PAGE, re.MULTILINE))
    real = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KvctlError)}
    assert drawn == real


def test_the_page_names_the_default_of_the_lease() -> None:
    assert f"default {weights.DEFAULT_LEASE_S:g} s" in PAGE
