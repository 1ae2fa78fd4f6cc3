"""`kvctl top` at terminals of every kind: dumb, without colour, of another size, and left to the shell for a while."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fake_sidecar_server import FakeSidecar
from test_cli_commands import KVCTL, drain, environment, fleet, read_until

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
COLOUR = re.compile(rb"\x1b\[[0-9;]*[1-9][0-9;]*m")
LONG_S = 60

SHELL = """
import os, signal, subprocess, sys
terminal = int(sys.argv[1])
process = subprocess.Popen(sys.argv[2:], stdin=terminal, stdout=terminal, stderr=terminal, process_group=0)
print(process.pid, flush=True)
while True:
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    print("stopped", flush=True)
    sys.stdin.readline()
    os.kill(process.pid, signal.SIGCONT)
print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""
"""What of a shell matters here: a session, a process group of its own for the command, and `fg`."""


class Terminal:
    """Both ends of a terminal."""

    def __init__(self, columns: int, lines: int) -> None:
        self.master, self.slave = pty.openpty()
        self._unread = b""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def echoes(self) -> bool:
        """Whether it is as a shell leaves it: what is typed is shown."""
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def shows(self, wanted: bytes) -> bytes:
        """What is written next, to the end of `wanted`."""
        if wanted not in self._unread:
            self._unread = read_until(self.master, wanted, LONG_S, self._unread)
        before, found, self._unread = self._unread.partition(wanted)
        assert found, before
        return before + found

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ends(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that writes here until it ends."""
        drain(self.master, process, LONG_S)
        return process.returncode


@contextmanager
def terminal(columns: int = 80, lines: int = 24) -> Iterator[Terminal]:
    made = Terminal(columns, lines)
    try:
        yield made
    finally:
        os.close(made.master)
        os.close(made.slave)


@contextmanager
def top(tmp_path: Path, at: Terminal, *flags: str, **surroundings: str) -> Iterator[subprocess.Popen[bytes]]:
    """`kvctl top` of one replica at a terminal."""
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        process = subprocess.Popen(
            [*KVCTL, "top", "--inventory", str(inventory), *flags],
            stdin=at.slave, stdout=at.slave, stderr=at.slave, env=of_terminal(tmp_path, **surroundings),
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def of_terminal(tmp_path: Path, **surroundings: str) -> dict[str, str]:
    """An environment that says no more of the terminal than what is given."""
    found = environment(tmp_path)
    for name in ("COLUMNS", "LINES", "TERM", "NO_COLOR"):
        found.pop(name, None)
    return {**found, **surroundings}


@pytest.mark.parametrize("surroundings", [{"TERM": "dumb"}, {}], ids=["dumb", "unset"])
def test_a_terminal_that_cannot_be_drawn_on_gets_lines_and_q_still_quits(
    tmp_path: Path, surroundings: dict[str, str]
) -> None:
    with terminal() as at, top(tmp_path, at, "--interval", "1h", **surroundings) as process:
        seen = at.shows(b"FLOWING")
        assert not at.echoes()
        at.press(b"q")
        assert at.ends(process) == 0
        assert at.echoes()
    assert b"\x1b" not in seen


@pytest.mark.parametrize("surroundings", [{"NO_COLOR": "1"}, {"LC_ALL": "C"}], ids=["NO_COLOR", "LC_ALL=C"])
def test_a_terminal_without_colour_is_drawn_on_all_the_same(tmp_path: Path, surroundings: dict[str, str]) -> None:
    with terminal() as at, top(tmp_path, at, TERM="xterm-256color", **surroundings) as process:
        seen = at.shows(b"FLOWING")
        at.press(b"q")
        seen += at.shows(LEAVE)
        assert at.ends(process) == 0
    assert ENTER in seen
    assert not COLOUR.search(seen)


def test_the_foot_of_the_screen_says_which_fleet_it_is(tmp_path: Path) -> None:
    with terminal() as at, top(tmp_path, at, TERM="xterm-256color") as process:
        at.shows(b"FLOWING")
        assert str(tmp_path)[:40].encode() in at.shows(b"   q quits")
        at.press(b"q")
        assert at.ends(process) == 0


def test_ctrl_c_gives_the_terminal_back_and_is_a_way_to_end(tmp_path: Path) -> None:
    with terminal() as at, top(tmp_path, at, TERM="xterm-256color") as process:
        at.shows(b"FLOWING")
        process.send_signal(signal.SIGINT)
        at.shows(LEAVE)
        assert at.ends(process) == 0
        assert at.echoes()


def test_a_cursor_key_is_not_escape_and_escape_quits(tmp_path: Path) -> None:
    with terminal() as at, top(tmp_path, at, "--interval", "200ms", TERM="xterm-256color") as process:
        at.shows(b"FLOWING")
        at.press(b"\x1b[A")
        for _ in range(5):
            at.shows(b"FLOWING")
        at.press(b"\x1b")
        at.shows(LEAVE)
        assert at.ends(process) == 0


def test_another_size_is_drawn_at_once_with_the_columns_that_fit(tmp_path: Path) -> None:
    with terminal(80, 24) as at, top(tmp_path, at, "--interval", "1h", TERM="xterm-256color") as process:
        at.shows(b"LAST RESET")
        at.resize(40, 12)
        at.shows(b"ENGINE")
        narrow = at.shows(b"FLOWING")
        at.press(b"q")
        assert at.ends(process) == 0
    assert b"VERDICT" in narrow
    assert b"LAST RESET" not in narrow


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory, terminal() as at:
        shell = subprocess.Popen(
            [sys.executable, "-c", SHELL, str(at.slave), *KVCTL, "top", "--inventory", str(inventory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[at.slave], text=True, start_new_session=True,
            env=of_terminal(tmp_path, TERM="xterm-256color"),
        )  # fmt: skip
        assert shell.stdin is not None
        assert shell.stdout is not None
        number = int(shell.stdout.readline())
        try:
            for _ in range(2):
                at.shows(b"FLOWING")
                assert not at.echoes()
                os.kill(number, signal.SIGTSTP)
                at.shows(LEAVE)
                assert shell.stdout.readline() == "stopped\n"
                assert at.echoes()
                shell.stdin.write("fg\n")
                shell.stdin.flush()
                at.shows(ENTER)
            at.shows(b"FLOWING")
            at.press(b"q")
            at.shows(LEAVE)
            assert shell.stdout.readline() == "ended 0\n"
            assert at.echoes()
        finally:
            if shell.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            shell.communicate(timeout=LONG_S)
