"""A fake engine in a process of its own, and how a test drives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """Started and serving. Ends with its test: its stdin is a pipe of ours."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.fake_engine", "--dir", os.fspath(directory), *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.fspath(ROOT), os.fspath(ROOT / "proto" / "gen")]),
        }
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._read()
        self.pid: int = ready["pid"]
        self.name: str = ready["name"]
        self.incarnation: str = ready["incarnation"]
        self.socket_path = Path(ready["socket"])
        self.page_path = Path(ready["page"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fake engine ended with code {self.process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Run a command of control.py; RuntimeError when it failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()
        if name in ("die",):
            self.process.wait(10)
            return {"ok": True}
        answer = self._read()
        if not answer["ok"]:
            raise RuntimeError(answer.get("error", "the command failed"))
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Close its stdin and wait; kill it when it does not end by itself."""
        if self.process.poll() is None:
            self.thaw()
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def spawn_engine(directory: Path, *arguments: str) -> Iterator[EngineProcess]:
    """A fake engine process, ended with the block. `arguments` as on its command line."""
    engine = EngineProcess(directory, *arguments)
    try:
        yield engine
    finally:
        engine.end()
