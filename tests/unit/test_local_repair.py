"""`kvctl local up` on a fleet that is up: what it refuses, and that a keeper is asked to start what is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sidecar.local import boot_log, repair
from sidecar.local import fleet as local_fleet
from sidecar.local.keeper import Plan
from sidecar.local.layout import Fleet, LocalError, Replica, prepare_state, read_record, write_record
from sidecar.local.processes import ProcessRef, alive, reference, send
from sidecar.local.programs import Settings

ROOT = Path(__file__).parents[2]

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


@pytest.mark.parametrize("booted", [True, False])
def test_status_advises_to_start_again_what_is_gone_only_where_up_would_do_it(
    tmp_path, keeper, monkeypatch, capsys, booted
):
    monkeypatch.setattr(local_fleet, "state_directory", lambda: tmp_path)
    a_fleet(tmp_path, reference(keeper.pid), a_replica(tmp_path, GONE, GONE), booted=booted)
    assert local_fleet.status() == 1
    told = capsys.readouterr().err
    assert ("starts again what is gone" in told, "still booting" in told) == (booted, not booted)


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


SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
host, port = sys.argv[1].split(":")
http.server.ThreadingHTTPServer((host, int(port)), Answer).serve_forever()
"""
SMALL_KEEPER = f"""
import os, sys
from pathlib import Path
from sidecar.local import keeper, programs

def program(address, log):
    return programs.Program([sys.executable, "-c", {SERVER!r}, address], dict(os.environ), Path(log))

programs.engine = lambda replica, run, settings: program(replica.api, replica.engine_log)
programs.sidecar = lambda replica, run: program(replica.metrics, replica.sidecar_log)
sys.exit(keeper.main())
"""
"""A real keeper whose engines and sidecars are small HTTP servers that say that they are well."""


@pytest.fixture
def fleet_of_two(tmp_path) -> Iterator[Path]:
    """The state directory of a fleet that is up."""
    prepare_state(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL_KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"},
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(msgspec.json.encode(Plan(Settings(replicas=2), str(tmp_path))) + b"\n")
        process.stdin.flush()
        told = b""
        while b'"booted"' not in told:
            line = process.stdout.readline()
            assert line, told
            told += line
        process.stdin.write(b"stay\n")
        process.stdin.flush()
        yield tmp_path
        process.terminate()
        process.stdin.close()
        assert b'"ended"' in process.stdout.read()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_keeper_starts_again_only_what_is_gone_on_the_ports_it_had(fleet_of_two):
    before = read_record(fleet_of_two)
    first, second = before.replicas
    for process in (first.sidecar_process, second.engine):
        assert send(process, signal.SIGKILL)
        until = time.monotonic() + 60
        while alive(process) and time.monotonic() < until:
            time.sleep(0.01)
    after = repair.repaired(before, fleet_of_two, None, 120)
    r0, r1 = after.replicas
    assert (r0.engine, r1.sidecar_process) == (first.engine, second.sidecar_process)
    assert r0.sidecar_process != first.sidecar_process
    assert r1.engine != second.engine
    assert [r0.metrics, r1.api] == [first.metrics, second.api]
    with pytest.raises(LocalError, match="nothing missing"):
        repair.repaired(after, fleet_of_two, None, 1)
