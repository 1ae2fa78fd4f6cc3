"""The set-up of a fresh machine: what stops it is said in one line, and an interrupted one is made good."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a clone as the set-up reads."""
    for name in ("requirements.txt", "requirements-engine.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "engine_bridge").mkdir()
    shutil.copy(ROOT / "engine_bridge" / "__init__.py", tmp_path / "engine_bridge")
    return tmp_path


@pytest.fixture
def module(clone: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_under_test", clone / ".ci" / "setup.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def program(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run(clone: Path, *, path: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    inherited |= {"PATH": path or os.environ["PATH"], "PYTHON": "", **environment}
    return subprocess.run(
        [str(clone / ".ci" / "setup"), "dev"], env=inherited, capture_output=True, text=True, timeout=90, check=False
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_a_python_that_is_too_old_is_named_with_its_version(clone, tmp_path):
    tools = tmp_path / "tools"
    old = 'case "$2" in *sys.exit*) exit 1;; *) echo "is Python 3.9.18";; esac'
    program(tools, "python3.9", old)
    line = only_line(run(clone, path=f"{tools}:{os.environ['PATH']}", PYTHON="python3.9"))
    assert "3.11" in line
    assert "PYTHON=python3.9 is Python 3.9.18" in line


def test_without_a_fit_python_on_path_the_one_that_is_there_is_named(clone, tmp_path):
    tools = tmp_path / "tools"
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python"):
        program(tools, name, "exit 127")
    program(tools, "python3", 'case "$2" in *sys.exit*) exit 1;; *) echo "3.9.2";; esac')
    line = only_line(run(clone, path=f"{tools}:{os.environ['PATH']}"))
    assert "python3 on PATH is 3.9.2" in line


def test_a_python_that_does_not_run_is_passed_over(clone, tmp_path):
    tools = tmp_path / "tools"
    program(tools, "python3.11", "echo 'python3.11: command not found' >&2; exit 127")
    program(
        tools, "python3.12", f'case "$1" in -c) exit 0;; *) echo "chosen: $2"; exit 0;; esac; exec {sys.executable}'
    )
    done = run(clone, path=f"{tools}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "chosen: dev\n")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_another_platform_is_named(clone, tmp_path, system, machine):
    tools = tmp_path / "tools"
    program(tools, "uname", f'case "$1" in -s) echo {system};; *) echo {machine};; esac')
    line = only_line(run(clone, path=f"{tools}:{os.environ['PATH']}"))
    assert "x86_64 or aarch64" in line
    assert (system if system != "Linux" else machine) in line


def test_without_a_network_the_package_index_is_named_and_the_next_run_tries_again(clone):
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PYTHON": sys.executable}
    done = run(clone, **nowhere, PIP_RETRIES="0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("setup: requirements.txt could not be installed: no network")
    assert (clone / "build" / "setup.log").read_text()
    assert not (clone / ".venv" / ".kvctl-installing").exists()
    assert not (clone / ".venv" / ".kvctl-requirements.txt").exists()


def test_a_disk_that_is_too_small_is_told_before_anything_is_downloaded(module, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage(10, 9, 2**30))
    with pytest.raises(module.SetupError, match=r"needs 3\.9 GiB of disk .* 1\.0 GiB are free"):
        module.check_machine("all")


def test_another_c_library_is_named(module, monkeypatch):
    monkeypatch.setattr(module.platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(module.SetupError, match=r"glibc 2\.31 or newer, this system has another C library"):
        module.check_machine("dev")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying ... NewConnectionError ... [Errno -3] Temporary failure in name resolution", "no network"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "certificate"),
        ("noise\nERROR: No matching distribution found for x==1\nmore", "No matching distribution found for x==1"),
        ("", "no output"),
    ],
)
def test_what_pip_says_becomes_one_reason(module, said, reason):
    assert reason in module.cause(said)


def test_an_interrupted_set_up_is_started_afresh(module):
    bin_directory = module.VENV / "bin"
    bin_directory.mkdir(parents=True)
    (bin_directory / "python").symlink_to(sys.executable)
    assert module.unusable() == ""
    module.MARKER.touch()
    assert "interrupted" in module.unusable()


def test_a_venv_whose_python_is_gone_is_made_anew(module):
    assert module.unusable() == "no .venv yet"
    module.VENV.mkdir()
    assert module.unusable() == "no interpreter in .venv"
    program(module.VENV / "bin", "python", "exit 1")
    assert "does not run" in module.unusable()


def test_torch_comes_from_its_own_index_only_when_pip_does_not_find_it(module, monkeypatch, capsys):
    asked = []

    def pip(what: str, *arguments: str, total: int = 0) -> None:
        asked.append(arguments)
        if what.startswith("torch") and "--index-url" not in arguments:
            raise module.SetupError("torch could not be installed: No matching distribution found for torch")

    monkeypatch.setattr(module, "pip", pip)
    monkeypatch.setenv("TORCH_INDEX", "https://example.invalid/cpu")
    module.requirements("requirements-engine.txt")
    pin = next(
        line for line in (ROOT / "requirements-engine.txt").read_text().splitlines() if line.startswith("torch==")
    )
    assert asked[:2] == [(pin,), ("--index-url", "https://example.invalid/cpu", pin)]
    assert pin.endswith("+cpu")
    monkeypatch.setenv("TORCH_INDEX", "")
    with pytest.raises(module.SetupError, match="No matching distribution"):
        module.requirements("requirements-engine.txt")


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-engine.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned_once_and_has_no_hash(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert all("==" in line and "--hash" not in line for line in lines)
    assert len(set(names)) == len(names)


def test_what_breaks_vllm_on_the_cpu_is_not_installed():
    text = (ROOT / "requirements-engine.txt").read_text()
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & {
        line.split("==")[0] for line in text.splitlines()
    }


def test_a_package_in_two_files_has_one_version():
    pins: dict[str, set[str]] = {}
    for name in ("requirements.txt", "requirements-engine.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                package, version = line.split("==")
                pins.setdefault(package, set()).add(version)
    assert {package: versions for package, versions in pins.items() if len(versions) > 1} == {}
