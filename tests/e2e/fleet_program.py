"""kvctl as a person runs it, and a look at what a fleet left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.local.layout import Fleet, read_record

SCRIPTS = Path(sys.executable).parent
BOOT_SECONDS = 300
"""A boot takes half a minute, and much longer where other work keeps the cores busy."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    code: int
    out: str
    err: str

    def one_line_on_stderr(self) -> str:
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@dataclass(frozen=True)
class Kvctl:
    """kvctl with a state directory of its own."""

    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCTL_")}
        return clean | {"XDG_STATE_HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home)}

    @property
    def state(self) -> Path:
        return self.home / "kvctl" / "local"

    @property
    def fleet(self) -> Fleet:
        fleet = read_record(self.state)
        assert fleet is not None
        return fleet

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(SCRIPTS / "kvctl"), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, timeout: float = 60) -> Finished:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"kvctl {arguments} did not end within {timeout} s\n{out}\n{err}") from None
        return Finished(process.returncode, out, err)

    async def run_beside(self, *arguments: str, timeout: float = 60) -> Finished:
        """Run while the test's own event loop (its load) goes on."""
        return await asyncio.to_thread(lambda: self.run(*arguments, timeout=timeout))


def left_behind(kvctl: Kvctl, run_directory: str) -> list[str]:
    """Processes, sockets and records that a fleet that has ended should not have left."""
    found = [str(path) for path in Path(run_directory).rglob("*")] if Path(run_directory).exists() else []
    found += [str(path) for path in kvctl.state.glob("*") if path.name in ("inventory.yaml", "fleet.json")]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            directory = os.readlink(entry / "cwd")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (directory.startswith(run_directory) or run_directory in command):
            found.append(f"process {entry.name}: {command}")
    return found
