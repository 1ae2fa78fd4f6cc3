"""Takes a picture of a command in a terminal: runs it in a pseudo-terminal of its own and writes the screen as SVG.

    python docs/record_terminal.py docs/kvctl-top.svg --keys q --wait-for "q quits" -- kvctl top
    python docs/record_terminal.py docs/kvctl-rolling.svg -- kvctl reset --mode keep --rolling

Nothing is drawn by hand: what the picture shows is what the command printed to an 80-column terminal.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 80, 24
CLEARED = "\x1b[H"
"""What a live screen sends before each frame."""
ERASED = re.compile("\r|\x1b\\[2K")
"""What a progress line sends before it is drawn anew: only what comes after the last one stays to be seen."""

UP = "\x1b[1A"
"""Cursor one line up, to erase it."""


def record(command: list[str], wait_for: str, keys: str, timeout_s: float) -> tuple[str, int]:
    """Run the command; returns what it sent to the terminal and its exit code. Keys go in once `wait_for` is seen."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    until = time.monotonic() + timeout_s
    sent = not keys
    while time.monotonic() < until:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                seen += os.read(master, 65536)
            except OSError:
                break
        if not sent and wait_for.encode() in seen:
            frame = seen
            os.write(master, keys.encode())
            sent = True
            process.wait(timeout=timeout_s)
            return frame.decode("utf-8", "replace"), process.returncode
        if not ready and process.poll() is not None:
            break
    process.wait(timeout=5)
    os.close(master)
    return seen.decode("utf-8", "replace"), process.returncode


def left_on_screen(text: str) -> list[str]:
    """The lines that stay to be seen after progress lines were erased and drawn anew."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        for _ in range(min(line.count(UP), len(lines))):
            lines.pop()
        lines.append(ERASED.split(line)[-1].rstrip())
    return lines


def main() -> int:
    """Read the command line, record, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--wait-for", default="", help="take the picture when this is on the screen")
    parser.add_argument("--keys", default="", help="keys to send then")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    text, code = record(options.command, options.wait_for, options.keys, options.timeout)
    frame = text.rpartition(CLEARED)[2] if CLEARED in text else text
    lines = left_on_screen(frame)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115 - closed at exit
    console.print(Text(f"$ {' '.join(options.command)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines).strip("\n")))
    # A picture in a README must not fetch anything: the reader's own fixed-width font does.
    options.svg.write_text(re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=options.command[0]), flags=re.S))
    return code


if __name__ == "__main__":
    sys.exit(main())
