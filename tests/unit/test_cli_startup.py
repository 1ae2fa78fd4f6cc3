"""How long kvctl takes to start, measured in processor time, which a busy machine does not change much."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMES = 8


def cheapest(*arguments: str) -> float:
    """Processor seconds of the cheapest of some runs."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}
    spent = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


@pytest.mark.parametrize("command", ["--help", "version"])
def test_starting_costs_at_most_eight_times_an_empty_python(command: str) -> None:
    cheapest("-c", "pass")
    assert cheapest("-m", "sidecar.cli.main", command) <= TIMES * cheapest("-c", "pass")
