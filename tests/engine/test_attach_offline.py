"""Offline `LLM`, with the engine in a process of its own and in the caller's, driven through its socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ROOT, eventually
from tests.fake_engine.client import BridgeClient

pytestmark = pytest.mark.engine


class Program:
    def __init__(self, engine_dir: Path, model: Path, *, multiprocessing: bool) -> None:
        environment = {
            **os.environ,
            "KVCTL_ENGINE_DIR": str(engine_dir),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.offline_llm", str(model)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the program ended with code {self.process.wait(30)}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.mark.parametrize("multiprocessing", [True, False], ids=["multi-process", "in-process"])
def test_an_offline_llm_is_reset_while_it_generates_and_between(
    engine_dir: Path, tiny_model_dir: Path, multiprocessing: bool
) -> None:
    program = Program(engine_dir, tiny_model_dir, multiprocessing=multiprocessing)
    try:
        assert program.read() == {"run": 1}
        (path,) = engine_dir.glob("engine-0-*.sock")
        with BridgeClient(path) as bridge:
            assert bridge.welcome is not None
            assert (bridge.welcome.pid == program.process.pid) == (not multiprocessing)
            program.go_on()
            undisturbed = program.read()["tokens"]
            assert program.read() == {"run": 2}
            idle = bridge.reset("fail")
            assert idle.state == "done", idle
            assert idle.result is not None
            assert idle.result.cached_blocks_dropped > 0
            program.go_on()
            eventually(lambda: bridge.admission(0).running, lambda running: running == 4)
            assert bridge.reset("fail").state == "refused"
            kept = 0
            while bridge.admission(0).running == 4 and kept < 10:
                outcome = bridge.reset("keep", reorder=True)
                assert outcome.state == "done"
                kept += outcome.result.requests_kept  # type: ignore[union-attr]
            assert kept > 4
            assert program.read()["tokens"] == undisturbed
            assert bridge.reset("fail", wait_for_idle=True).state == "done"
    finally:
        program.end()
    assert program.process.returncode == 0
    assert list(engine_dir.iterdir()) == []
