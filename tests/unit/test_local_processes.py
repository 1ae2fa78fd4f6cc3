"""Ending exactly the processes of a fleet: sessions, working directories, start times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sidecar.local.processes import ProcessRef, alive, end, members, reference, send, stat_of

WAITS = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {WAITS!r}], stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def start(started: list[subprocess.Popen[bytes]], code: str, directory: Path) -> ProcessRef:
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=directory, start_new_session=True, stdout=subprocess.PIPE
    )
    started.append(process)
    assert process.stdout
    assert process.stdout.readline() == b"up\n"
    return reference(process.pid)


def test_a_leader_and_its_children_are_members_of_its_session(started, tmp_path):
    leader = start(started, PARENT, tmp_path)
    found = members([leader], tmp_path)
    assert leader in found
    assert len(found) == 2


def test_children_stay_members_when_their_leader_is_gone(started, tmp_path):
    leader = start(started, PARENT, tmp_path)
    (child,) = [process for process in members([leader], tmp_path) if process != leader]
    assert send(leader, signal.SIGKILL)
    started[0].wait()
    assert members([leader], tmp_path) == [child]
    assert end([leader], tmp_path, patience_seconds=5) == []
    assert not alive(child)


def test_a_process_of_the_session_that_works_elsewhere_is_no_member(started, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    leader = start(started, WAITS, elsewhere)
    assert members([leader], tmp_path) == []


def test_a_process_of_another_session_in_the_same_directory_is_no_member(started, tmp_path):
    leader = start(started, WAITS, tmp_path)
    other = start(started, WAITS, tmp_path)
    assert members([leader], tmp_path) == [leader]
    assert end([leader], tmp_path, patience_seconds=5) == []
    assert alive(other)


def test_a_pid_with_another_start_time_is_somebody_else(started, tmp_path):
    leader = start(started, WAITS, tmp_path)
    impostor = ProcessRef(leader.pid, leader.start_ticks + 1)
    assert not alive(impostor)
    assert not send(impostor, signal.SIGKILL)
    assert end([impostor], tmp_path, patience_seconds=0.2) == []
    assert alive(leader)


def test_who_ignores_sigterm_is_killed(started, tmp_path):
    leader = start(started, STUBBORN, tmp_path)
    began = time.monotonic()
    assert end([leader], tmp_path, patience_seconds=0.3) == []
    assert not alive(leader)
    assert time.monotonic() - began < 5


def test_a_stopped_process_ends_in_good_order(started, tmp_path):
    leader = start(started, WAITS, tmp_path)
    send(leader, signal.SIGSTOP)
    assert end([leader], tmp_path, patience_seconds=5) == []
    assert started[0].wait() == -signal.SIGTERM


def test_a_zombie_does_not_count_as_alive(started, tmp_path):
    leader = start(started, WAITS, tmp_path)
    os.kill(leader.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (found := stat_of(leader.pid)) is not None and found.state != "Z" and time.monotonic() < deadline:
        os.sched_yield()
    assert not alive(leader)
    assert members([leader], tmp_path) == []


def test_a_command_name_with_parentheses_and_spaces_is_read_right(started, tmp_path):
    odd = tmp_path / "a) b (c"
    odd.symlink_to(sys.executable)
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) b (c', 0, 0, 0); " + WAITS
    leader = start(started, code, tmp_path)
    found = stat_of(leader.pid)
    assert found is not None
    assert found.session == leader.pid


def test_a_process_that_never_was_has_no_reference():
    with pytest.raises(ProcessLookupError):
        reference(2**22 + 1)
