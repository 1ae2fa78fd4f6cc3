"""The preStop of an engine's container waits for requests, ends in time, and needs nothing but the engine's pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_engine import EngineProcess, spawn_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    """The folder as the image lays it out: the bridge and the hook, nothing else."""
    folder = tmp_path / "bridge"
    shutil.copytree(ROOT / "engine_bridge", folder / "engine_bridge")
    shutil.copy(ROOT / "deploy/hooks/wait_idle.py", folder / "kvctl_wait_idle.py")
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    folder = tmp_path / "engines"
    folder.mkdir(mode=0o700)
    with spawn_engine(folder) as engine:
        yield engine


def hook(bridge: Path, engines: Path, timeout: float, quiet: float = 0.2) -> subprocess.Popen[str]:
    # -S: no site-packages, so that a vLLM image of any content will do. The script's own folder is on the path.
    command = [sys.executable, "-S", str(bridge / "kvctl_wait_idle.py")]
    command += ["--timeout", str(timeout), "--quiet", str(quiet), "--engine-dir", str(engines)]
    return subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, cwd="/", stderr=subprocess.PIPE, text=True)


def test_it_waits_for_running_requests_and_ends_when_they_have(bridge: Path, engine: EngineProcess) -> None:
    engine.do("hold", requests=2, blocks=4)
    waiting = hook(bridge, engine.page_path.parent, 300)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1)
    engine.do("release")
    assert waiting.wait(60) == 0


def test_it_gives_up_in_time_and_says_what_was_left(bridge: Path, engine: EngineProcess) -> None:
    engine.do("hold", requests=2, blocks=4)
    waiting = hook(bridge, engine.page_path.parent, 0.5)
    _, told = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "2 requests left" in told


def test_an_engine_that_died_with_requests_is_not_waited_for(bridge: Path, engine: EngineProcess) -> None:
    engine.do("hold", requests=2, blocks=4)
    engine.kill()
    assert hook(bridge, engine.page_path.parent, 30).wait(60) == 0


@pytest.mark.parametrize("what", ["missing", "empty", "rubbish"])
def test_a_folder_without_engines_holds_no_pod_up(bridge: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "nobody"
    if what != "missing":
        folder.mkdir()
    if what == "rubbish":
        (folder / "engine-0-abcd.page").write_bytes(b"not a page")
    assert hook(bridge, folder, 30).wait(60) == 0
