"""Alive, stopped, dead, or not to be told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sidecar.backends.bridge import process
from sidecar.backends.engine import Liveness


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait(10)
    assert child.stdin is not None
    child.stdin.close()


def eventually(pid: int, ticks: int, wanted: Liveness) -> None:
    until = time.monotonic() + 5
    while process.liveness(pid, ticks) is not wanted:
        assert time.monotonic() < until, process.liveness(pid, ticks)


def test_a_process_is_alive_then_stopped_then_dead_even_while_nobody_reaps_it(child):
    found = process.stat(child.pid)
    assert found is not None
    ticks = found[1]
    assert process.liveness(child.pid, ticks) is Liveness.ALIVE
    os.kill(child.pid, signal.SIGSTOP)
    eventually(child.pid, ticks, Liveness.STOPPED)
    os.kill(child.pid, signal.SIGKILL)
    eventually(child.pid, ticks, Liveness.DEAD)
    child.wait(10)
    assert process.liveness(child.pid, ticks) is Liveness.DEAD


def test_a_pid_that_was_given_to_another_process_is_dead():
    found = process.stat(os.getpid())
    assert found is not None
    assert process.liveness(os.getpid(), found[1]) is Liveness.ALIVE
    assert process.liveness(os.getpid(), found[1] + 1) is Liveness.DEAD


def test_a_process_of_another_namespace_cannot_be_told():
    assert process.liveness(0, 5) is Liveness.UNKNOWN


def test_a_process_that_is_there_and_cannot_be_looked_at_cannot_be_told(monkeypatch):
    monkeypatch.setattr(process, "stat", lambda pid: None)
    assert process.liveness(os.getpid(), 5) is Liveness.UNKNOWN


def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields(tmp_path, monkeypatch):
    fields = " ".join(["R", *("0" for _ in range(18)), "4242", "0"])
    (tmp_path / "stat").write_text(f"7 (evil) name (x) {fields}\n".replace("(x) ", "(x)) "))
    real_open = open
    monkeypatch.setattr("builtins.open", lambda *a, **k: real_open(tmp_path / "stat", **k))
    assert process.stat(7) == ("R", 4242)
