"""`kvctl local up` on a fleet that is up: what it refuses, and that a keeper is asked to start what is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.local import boot_log, repair
from sidecar.local.layout import Fleet, LocalError, Replica, write_record
from sidecar.local.processes import ProcessRef, reference

KEEPER = (
    "import os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    "print('up', flush=True)\n"
    "signal.sigwait([signal.SIGUSR1])\n"
    "print('asked', flush=True)\n"
    "sys.stdin.read()\n"
)
GONE = ProcessRef(2**22 - 1, 1)


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def a_replica(folder: Path, engine: ProcessRef | None, sidecar: ProcessRef | None) -> Replica:
    logs = [str(folder / name) for name in ("engine.log", "sidecar.log")]
    return Replica("r0", "127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:1", *logs, engine, sidecar)


def a_fleet(folder: Path, keeper: ProcessRef, *replicas: Replica, booted: bool = True) -> Fleet:
    fleet = Fleet(keeper, str(folder), list(replicas), booted)
    write_record(folder, fleet)
    return fleet


def test_a_fleet_of_another_size_or_one_that_boots_is_not_touched(tmp_path, keeper):
    whole = a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, GONE, GONE))
    with pytest.raises(LocalError, match="a local fleet of 1 is up, not of 3; end it with `kvctl local down`"):
        repair.repaired(whole, tmp_path, 3, 1)
    boots = a_fleet(tmp_path, reference(keeper.pid), booted=False)
    with pytest.raises(LocalError, match="still booting"):
        repair.repaired(boots, tmp_path, None, 1)


def test_with_nothing_missing_up_says_so(tmp_path, keeper, monkeypatch):
    monkeypatch.setattr(repair, "engine_state", lambda replica, directory: "serving")
    me = reference(os.getpid())
    fleet = a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, me, me))
    with pytest.raises(LocalError, match="up already, with nothing missing") as caught:
        repair.repaired(fleet, tmp_path, None, 1)
    assert caught.value.exit_code == 2


def test_an_engine_that_runs_and_does_not_answer_is_left_to_a_person(tmp_path, keeper):
    me = reference(os.getpid())
    fleet = a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, me, me))
    with pytest.raises(LocalError, match="r0: the engine runs and does not answer") as caught:
        repair.repaired(fleet, tmp_path, None, 1)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("lost", [["engine"], ["sidecar"], ["engine", "sidecar"]])
def test_the_keeper_is_asked_for_what_is_gone_and_a_part_that_ends_again_is_told(tmp_path, keeper, capsys, lost):
    me = reference(os.getpid())
    engine, sidecar = (GONE if part in lost else me for part in ("engine", "sidecar"))
    fleet = a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, engine, sidecar))
    # What the keeper will have recorded: the missing parts under other pids, ended as well by now.
    again = ProcessRef(GONE.pid, 2)
    parts = [again if part in lost else me for part in ("engine", "sidecar")]
    write_record(tmp_path, Fleet(fleet.keeper, fleet.directory, [a_replica(tmp_path, parts[0], parts[1])], True))
    (tmp_path / f"{lost[0]}.log").write_text("ValueError: no room\n")
    with pytest.raises(LocalError, match=r"ended again: ValueError: no room \(log: "):
        repair.repaired(fleet, tmp_path, None, 30)
    assert keeper.stdout.readline() == b"asked\n"
    assert f"r0: its {' and '.join(lost)} is gone" in capsys.readouterr().err


def test_a_fleet_that_is_ended_meanwhile_is_told(tmp_path, keeper):
    fleet = a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, GONE, GONE))
    (tmp_path / "fleet.json").unlink()
    with pytest.raises(LocalError, match="ended meanwhile"):
        repair.repaired(fleet, tmp_path, None, 30)


def test_the_log_of_the_run_before_is_kept_beside_the_new_one(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("Application startup complete\n")
    boot_log.begin_anew(log)
    assert boot_log.stage_of(log) == "importing vLLM, the longest part"
    assert (tmp_path / "engine.log.1").read_text() == "Application startup complete\n"
    boot_log.begin_anew(tmp_path / "never.log")
