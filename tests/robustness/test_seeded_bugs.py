"""Every seeded bug is seen by the test that claims to see it, in a copy of the sources where all is well without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.contract.sidecar_process import ROOT
from tests.robustness.seeded_bugs import BUGS, Bug

COPIED = ("engine_bridge", "sidecar", "proto/gen", "tests")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sources, for bugs to be put into."""
    copy = tmp_path_factory.mktemp("t")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    yield copy
    shutil.rmtree(copy)


def run(tree: Path, bugs: Iterable[Bug]) -> subprocess.CompletedProcess[str]:
    """The tests of these bugs over that tree, and nothing of this one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVCTL_", "PYTEST_", "PYTHON"))}
    path = os.pathsep.join([str(tree), str(tree / "proto" / "gen")])
    # No byte code: a planted file may have the size and the second of the one before.
    env = {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    return subprocess.run(
        [*words, "--timeout", "200", *dict.fromkeys(bug.node(tree) for bug in bugs)],
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def caught(tree: Path, bug: Bug) -> None:
    file = tree / bug.file
    clean = file.read_text()
    file.write_text(bug.planted(clean))
    try:
        ended = run(tree, [bug])
    finally:
        file.write_text(clean)
    assert ended.returncode == 1, f"{bug.what}: the test did not fail\n{ended.stdout}\n{ended.stderr}"
    assert re.search(r"\b[1-9]\d* failed", ended.stdout), ended.stdout
    assert " error" not in ended.stdout.splitlines()[-1], ended.stdout


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_bug_fits_its_source(bug: Bug) -> None:
    """Cheap, and always run: whoever changes a line that a bug replaces is told here."""
    planted = bug.planted((ROOT / bug.file).read_text())
    compile(planted, bug.file, "exec")
    assert bug.node(ROOT)


@pytest.mark.timeout(600)
def test_without_a_bug_the_tests_pass_in_the_copy_too(tree: Path) -> None:
    ended = run(tree, [bug for bug in BUGS if not bug.slow])
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", [bug for bug in BUGS if not bug.slow], ids=lambda bug: bug.what)
def test_a_bug_is_caught(tree: Path, bug: Bug) -> None:
    caught(tree, bug)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_bugs_on_vllms_structures_are_caught(tree: Path) -> None:
    slow = [bug for bug in BUGS if bug.slow]
    ended = run(tree, slow)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    for bug in slow:
        caught(tree, bug)
