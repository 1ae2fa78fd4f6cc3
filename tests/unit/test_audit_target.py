"""Where audit lines go is checked before the first operation needs one."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sidecar.replica import main as program
from sidecar.replica.audit import AuditLog
from sidecar.rpc import logs
from sidecar.rpc.auth import Caller, Role
from sidecar.rpc.errors import Failure


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    unread, full = os.pipe()
    os.set_blocking(full, False)
    os.write(full, bytes(1 << 20))
    os.set_blocking(full, True)
    yield unread, full
    os.close(unread)
    os.close(full)


def started(monkeypatch, capsys, tmp_path: Path, *words: str) -> tuple[int, str]:
    base = ["--engine-dir", str(tmp_path / "engines"), "--listen", "127.0.0.1:0", "--metrics", "off", "--check"]
    monkeypatch.setattr("sys.argv", ["kvctl-sidecar", *base, *words])
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return program.main(), capsys.readouterr().err.strip()


def test_a_folder_that_is_not_there_is_told_by_setting_and_path_without_numbers(monkeypatch, capsys, tmp_path):
    code, told = started(monkeypatch, capsys, tmp_path, "--audit-log", str(tmp_path / "nodir" / "a"))
    assert code == 4
    assert f"--audit-log {tmp_path}/nodir/a cannot be opened" in told
    assert told.endswith("No such file or directory")
    assert "Errno" not in told


def test_a_token_file_that_is_not_there_is_told_without_numbers(monkeypatch, capsys, tmp_path):
    code, told = started(monkeypatch, capsys, tmp_path, "--token-file", f"admin={tmp_path}/none")
    assert code == 4
    assert f"token file {tmp_path}/none cannot be read" in told
    assert "Errno" not in told


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--ready-file", "/none/ready"), 4, "--ready-file /none/ready: uid"),
        (("--ready-file", "/"), 4, "--ready-file / is a directory"),
        (("--ready-file", "/dev/null"), 4, "--ready-file /dev/null is there and no regular file"),
        (("--engine-url", "http://me:secret@127.0.0.1:1"), 2, "must not hold credentials"),
        (("--engine-url", "http://127.0.0.1:port"), 2, "engine URL"),
    ],
)
def test_a_check_finds_what_would_end_the_start(monkeypatch, capsys, tmp_path, words, code, expected):
    found, told = started(monkeypatch, capsys, tmp_path, *words)
    assert found == code
    assert expected in told


@pytest.mark.parametrize("words", ["--token-file=admin={}", "--engine-token-file={}", "--tls-cert={} --tls-key={}"])
def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(monkeypatch, capsys, tmp_path, words):
    os.mkfifo(tmp_path / "pipe")
    found, told = started(monkeypatch, capsys, tmp_path, *words.format(*[tmp_path / "pipe"] * 2).split())
    assert found == 2
    assert f"{tmp_path}/pipe is not a regular file" in told
    assert "secret" not in told


def test_a_device_that_takes_no_lines_is_refused_and_the_null_device_is_not():
    with pytest.raises(OSError, match="--audit-log /dev/full: it is a device"):
        AuditLog("/dev/full", "r0")
    AuditLog(os.devnull, "r0").close()


def test_a_full_disk_is_told_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=10, f_bavail=0, f_bfree=0))
    with pytest.raises(OSError, match="no space left"):
        AuditLog(str(tmp_path / "a"), "r0")


def test_a_pipe_that_nobody_reads_refuses_a_line_and_stops_nothing(full_pipe, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="fifo cannot be opened"):
        AuditLog(str(tmp_path / "fifo"), "r0")
    audit = AuditLog("-", "r0")
    unread, audit._fd = full_pipe
    with pytest.raises(Failure, match="the pipe is full"):
        audit.begin(Caller("local", Role.ADMIN), "", "reset", "1", {})
    os.read(unread, 1 << 20)
    audit.begin(Caller("local", Role.ADMIN), "", "reset", "2", {})
    assert json.loads(os.read(unread, 4096))["request_id"] == "2"


def test_log_lines_that_nobody_reads_are_dropped(full_pipe, monkeypatch):
    unread, full = full_pipe
    monkeypatch.setattr("sys.stderr", os.fdopen(os.dup(full), "w", buffering=1))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure("logfmt", "info")
    logging.getLogger("tests.full").info("nobody reads this")
    os.read(unread, 1 << 20)
    logging.getLogger("tests.full").info("somebody reads this")
    assert b'msg="somebody reads this"' in os.read(unread, 4096)


def test_log_lines_go_where_no_descriptor_is(monkeypatch):
    monkeypatch.setattr("sys.stderr", written := io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure("logfmt", "info")
    logging.getLogger("tests.memory").info("kept")
    assert "msg=kept" in written.getvalue()


@pytest.fixture
def nearly_full_pipe() -> Iterator[tuple[int, int]]:
    """Room for PIPE_BUF bytes: it counts as writable, and a longer write would wait for a reader."""
    unread, into = os.pipe()
    os.write(into, bytes(fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 2 * select.PIPE_BUF) - select.PIPE_BUF))
    yield unread, into
    os.close(unread)
    os.close(into)


def without_waiting(work: Callable[[], object]) -> None:
    """Fails when the work waits for somebody to read; the pipe's end with the test ends its thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for a reader"


def test_a_long_log_line_is_cut_rather_than_waited_for_and_the_next_one_is_whole(nearly_full_pipe, monkeypatch):
    unread, into = nearly_full_pipe
    monkeypatch.setattr("sys.stderr", os.fdopen(os.dup(into), "w", buffering=1))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure("logfmt", "info")
    without_waiting(lambda: logging.getLogger("tests.long").info("long text=%s", "x" * 20_000))
    cut = os.read(unread, 1 << 20)
    assert b"msg=long" in cut
    assert cut.endswith(b"xxx")
    logging.getLogger("tests.long").info("the next")
    assert os.read(unread, 4096).startswith(b"\ntime=")


def test_a_long_audit_line_is_refused_rather_than_waited_for_and_the_next_one_is_whole(nearly_full_pipe):
    audit = AuditLog("-", "r0")
    unread, audit._fd = nearly_full_pipe
    refusals: list[Failure] = []

    def begin() -> None:
        try:
            audit.begin(Caller("local", Role.ADMIN), "", "reset", "1", {"targets": "x" * 20_000})
        except Failure as error:
            refusals.append(error)

    without_waiting(begin)
    assert "cut short" in refusals[0].message
    os.read(unread, 1 << 20)
    audit.begin(Caller("local", Role.ADMIN), "", "reset", "2", {})
    torn, line, rest = os.read(unread, 4096).split(b"\n")
    assert (torn, rest, json.loads(line)["request_id"]) == (b"", b"", "2")


def test_a_closed_stdout_is_no_place_for_audit_lines(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.stdout", None)
    code, told = started(monkeypatch, capsys, tmp_path)
    assert (code, told) == (4, "kvctl-sidecar: --audit-log -: stdout is closed; leave it open, or give a file")
    assert started(monkeypatch, capsys, tmp_path, "--audit-log", str(tmp_path / "audit"))[0] == 0


def test_log_lines_go_nowhere_where_stderr_is_closed(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure("logfmt", "info")
    logging.getLogger("tests.closed").warning("nobody hears this")
