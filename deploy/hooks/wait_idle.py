"""preStop for the engine's container: wait until no request runs or waits, at most so long.

It reads the pages that the bridge keeps in the engine directory, so it needs no curl, no port, and neither the
sidecar nor vLLM's API server: whichever container the kubelet stops first, it works. Standard library only; it is
run by the Python of the vLLM image with the bridge's folder beside it:

    python3 /kvctl/bridge/kvctl_wait_idle.py --timeout 100

New requests still arrive for a moment after a pod has begun to terminate, until every router has heard of it. So an
idle moment is not the end: idleness must hold for a while (--quiet).

Exit code 0 when the engines are idle or gone, 1 when requests were left at the end of the time. kubelet stops the
container either way; the code and the line on stderr are for the event that it records.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from engine_bridge.page import PageError, PageReader, Phase, Snapshot

POLL_S = 0.1
_GONE = frozenset({Phase.STOPPING, Phase.STOPPED})


def _alive(snapshot: Snapshot) -> bool:
    """Whether the process that wrote the page still is: pids repeat, so its start time must match as well."""
    counters = snapshot.counters
    try:
        fields = Path(f"/proc/{counters.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return not counters.process_start_ticks or int(fields.split()[19]) == counters.process_start_ticks


def requests_left(directory: Path) -> int:
    """Requests running and waiting over all live engines with a page in `directory`."""
    left = 0
    for path in sorted(directory.glob("*.page")):
        try:
            reader = PageReader(path)
        except (PageError, OSError):
            continue  # not written yet, or removed between the listing and now: nothing to wait for
        try:
            snapshot = reader.read()
        except PageError:
            continue
        finally:
            reader.close()
        counters = snapshot.counters
        if counters.phase in _GONE or not _alive(snapshot):
            continue
        left += counters.running + counters.waiting
    return left


def wait(directory: Path, timeout_s: float, quiet_s: float) -> int:
    """Requests left when idleness has held for `quiet_s` (then 0) or the time is over."""
    deadline = time.monotonic() + timeout_s
    idle_since: float | None = None
    while True:
        left, now = requests_left(directory), time.monotonic()
        if left:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        if idle_since is not None and now - idle_since >= quiet_s:
            return 0
        if now >= deadline:
            return left
        time.sleep(POLL_S)


def main() -> int:
    """Wait; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=100.0, help="longest wait, seconds")
    parser.add_argument("--quiet", type=float, default=2.0, help="how long it must stay idle, seconds")
    parser.add_argument("--engine-dir", type=Path, default=Path(os.environ.get("KVCTL_ENGINE_DIR", "/run/kvctl")))
    options = parser.parse_args()
    left = wait(options.engine_dir, options.timeout, options.quiet)
    if left:
        sys.stderr.write(f"{left} requests left after {options.timeout:g} s; the engine is stopped with them\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
