"""Fleets that lose a part, and boots that are cut short: what stays, what is said, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sidecar.local.health import engine_state, is_lost
from sidecar.local.layout import Fleet, read_record
from sidecar.local.processes import alive
from tests.e2e.fleet_program import BOOT_SECONDS, Kvctl, left_behind

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 60) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s in vain for {what}")


def engine_cores(fleet: Fleet, replica: int) -> list[int]:
    """Pids of the engine cores beside a replica's sidecar, by the bridge's own account."""
    from engine_bridge.page import PageReader

    found = []
    for path in Path(fleet.directory, f"r{replica}").glob("engine-*.page"):
        reader = PageReader(path)
        found.append(reader.read().counters.pid)
        reader.close()
    return found


def test_with_one_engine_killed_the_other_replica_is_reset_and_up_starts_only_the_dead_one_again(scratch):
    booted = scratch.run("local", "up", "--replicas", "2", timeout=BOOT_SECONDS)
    assert booted.code == 0, booted.err
    fleet = scratch.fleet
    try:
        (pid,) = engine_cores(fleet, 1)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        done = scratch.run("reset", "--mode", "keep", "--replicas", "all", "-o", "json")
        took = time.monotonic() - started
        assert done.code == 3, done.err
        assert "Traceback" not in done.err
        rows = {row["replica"]: row for row in json.loads(done.out)["results"]}
        assert rows["r0"]["code"] == "OK"
        assert rows["r1"]["code"] == "UNAVAILABLE"
        assert rows["r1"]["reason"] == "ENGINE_DEAD"
        answered = float(rows["r1"]["took"].removesuffix("s"))
        assert answered < 2, f"the dead engine's row took {answered} s of {took} s"
        status = scratch.run("local", "status")
        assert status.code == 3
        assert "`kvctl local up` starts again what is gone" in status.err
        sidecar = fleet.replicas[0].sidecar_process
        assert sidecar is not None
        os.kill(sidecar.pid, signal.SIGKILL)
        wait_for("the sidecar to be gone", lambda: not alive(sidecar))
        wait_for("vLLM to see its engine dead", lambda: is_lost(engine_state(fleet.replicas[1], Path(fleet.directory))))
        again = scratch.run("local", "up", timeout=BOOT_SECONDS)
        assert again.code == 0, again.err
        assert "r0: its sidecar is gone" in again.err
        assert "r1: its engine is gone" in again.err
        r0, r1 = scratch.fleet.replicas
        assert (r0.engine, r1.sidecar_process) == (fleet.replicas[0].engine, fleet.replicas[1].sidecar_process)
        assert [r0.sidecar, r1.api] == [fleet.replicas[0].sidecar, fleet.replicas[1].api]
        assert Path(f"{r1.engine_log}.1").exists()
        healthy = scratch.run("reset", "--mode", "keep", "--replicas", "all", "-o", "name")
        assert (healthy.code, healthy.out) == (0, "r0\nr1\n"), healthy.err
        assert scratch.run("local", "up").code == 2
    finally:
        ended = scratch.run("local", "down")
    assert ended.code == 0, ended.err
    assert left_behind(scratch, fleet.directory) == []


def booting(kvctl: Kvctl, *arguments: str) -> tuple[object, Fleet]:
    """Start `arguments`, and come back when vLLM has been started and is far from ready."""
    process = kvctl.start(*arguments)
    wait_for("vLLM to be started", lambda: (f := read_record(kvctl.state)) and len(f.leaders()) == 2)
    return process, kvctl.fleet


@pytest.mark.parametrize("command", [("local", "up"), ("demo",)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_boot_that_is_cut_short_leaves_nothing(scratch, command, number):
    process, fleet = booting(scratch, *command, "--replicas", "1")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err
    wait_for("the keeper to end", lambda: not alive(fleet.keeper))
    assert left_behind(scratch, fleet.directory) == []
    assert not any(alive(leader) for leader in fleet.leaders())


def test_a_boot_whose_keeper_is_killed_leaves_nothing_and_says_so(scratch):
    process, fleet = booting(scratch, "local", "up", "--replicas", "1")
    os.kill(fleet.keeper.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "keeper.log" in err
    assert "Traceback" not in err
    assert left_behind(scratch, fleet.directory) == []


def test_an_engine_that_cannot_start_is_told_with_its_own_words(scratch):
    done = scratch.run("local", "up", "--replicas", "1", "--engine-arg=--no-such-option", timeout=120)
    assert done.code == 1
    assert "--no-such-option" in done.err
    assert "Traceback" not in done.err
    assert not (scratch.state / "fleet.json").exists()
    log = scratch.state / "logs" / "r0-engine.log"
    assert str(log) in done.err
    assert log.exists()


def test_down_ends_a_fleet_whose_keeper_was_killed_after_it_came_up(scratch):
    booted = scratch.run("local", "up", "--replicas", "1", timeout=BOOT_SECONDS)
    assert booted.code == 0, booted.err
    fleet = scratch.fleet
    os.kill(fleet.keeper.pid, signal.SIGKILL)
    ended = scratch.run("local", "down")
    assert ended.code == 0, ended.err
    assert left_behind(scratch, fleet.directory) == []


def test_down_without_a_fleet_is_no_error(scratch):
    assert scratch.run("local", "down").code == 0
    assert scratch.run("local", "status").code == 4
