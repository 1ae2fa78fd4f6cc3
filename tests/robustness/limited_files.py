"""Runs one of our programs on a disk that is as good as full: no file may grow beyond so many bytes.

    python -m tests.robustness.limited_files BYTES MODULE [ARGUMENT...]

The limit is the process's own (RLIMIT_FSIZE), so nothing else on the machine notices. Writing past it fails with EFBIG,
because Python ignores SIGXFSZ. The soft limit is what counts: the test lifts it again from outside, with `lift`.
"""

from __future__ import annotations

import resource
import runpy
import sys


def fill(pid: int) -> None:
    """For tests: there is no more space. What lies within the first 4 KiB of a file can still be written over."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def lift(pid: int) -> None:
    """For tests: there is space again."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
