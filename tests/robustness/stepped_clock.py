"""Runs one of our programs under a wall clock that a test can step while it runs.

    python -m tests.robustness.stepped_clock OFFSET_FILE MODULE [ARGUMENT...]

The file holds a number of seconds, which is added to what `time.time`, `time.time_ns` and `datetime.now` tell our code
in this process, and protobuf. Stepping the machine's clock would step it for everybody else; so what C code reads for
itself (SQLite, OpenSSL) is not stepped, nor gRPC, which computes with what its C core reads: it reads the clock in
compiled code, whose caller in Python is `sidecar.rpc.deadlines`.
"""

from __future__ import annotations

import datetime
import runpy
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Self

GRPC_CALLER = "sidecar.rpc.deadlines"
STEPPED = ("sidecar.", "engine_bridge.", "google.protobuf.")

_real_time, _real_time_ns = time.time, time.time_ns


def step(file: Path, seconds: float) -> None:
    """For tests: the clock now differs by so much from the machine's. Whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(f"{seconds}\n")
    partial.replace(file)


def _install(file: Path) -> None:
    def offset(caller: FrameType) -> float:
        name = caller.f_globals.get("__name__", "")
        return float(file.read_text()) if name.startswith(STEPPED) and name != GRPC_CALLER else 0.0

    class SteppedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return super().now(tz) + datetime.timedelta(seconds=offset(sys._getframe(1)))

    time.time = lambda: _real_time() + offset(sys._getframe(1))
    time.time_ns = lambda: _real_time_ns() + int(offset(sys._getframe(1)) * 1e9)
    datetime.datetime = SteppedDatetime  # type: ignore[misc]


if __name__ == "__main__":
    _install(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
