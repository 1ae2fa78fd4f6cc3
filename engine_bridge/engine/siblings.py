"""Which data-parallel ranks run beside this one: what a rank that never attached cannot tell by itself.

A dense model's rank is told by vLLM that it is rank 0 of 1, and behind an external load balancer a size would count
ranks of other machines. But vLLM starts the ranks of one machine from one process and gives each a title with its
rank. So the ranks beside this one are the children of its parent with such a title, as long as /proc tells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TITLE: Final = re.compile(rb"(?:^|[\0: ])EngineCore_DP(\d{1,5})(?:$|[\0 ])")
_PROC: Final = Path("/proc")


def local_ranks(own: int, parent: int | None = None, proc: Path = _PROC) -> tuple[int, ...]:
    """Ranks that the same process started, this one among them, in order; empty when that cannot be told. Reads one
    small file a process of the machine, once.
    """
    parent = os.getppid() if parent is None else parent
    found = {rank for pid in _children(proc, parent) if (rank := _rank_of(pid)) is not None}
    return tuple(sorted(found)) if own in found else ()


def _children(proc: Path, parent: int) -> Iterator[Path]:
    try:
        processes = [path for path in proc.iterdir() if path.name.isdigit()]
    except OSError:
        return
    for process in processes:
        try:
            # After the name in brackets, which may hold anything: state, then the parent's id.
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if len(fields) > 1 and fields[1] == b"%d" % parent:
            yield process


def _rank_of(process: Path) -> int | None:
    try:
        title = (process / "cmdline").read_bytes()
    except OSError:
        return None
    match = _TITLE.search(title)
    return int(match.group(1)) if match else None
