"""The Dockerfile, instruction by instruction, without Docker: its folders lie below a temporary one.

What only an image has (its base, its users) is told apart by name; an instruction that this file does not know fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("/opt/kvctl", "/wheels", "/src")
"""Absolute paths of the build; any other one in a command would be one of this machine."""
OF_THE_IMAGE = {"FROM", "LABEL", "USER", "ENTRYPOINT"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines()]
    return [(word, rest.strip()) for word, _, rest in found]


@dataclass
class Image:
    """What the build has made so far."""

    root: Path
    python: Path
    """bin folder of the image's own Python."""
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)

    def below(self, text: str) -> str:
        for path in re.findall(r"(?<![\w.$/-])/[\w./-]+", text):
            assert path.startswith(FOLDERS), f"{text}: {path} is none of the folders of the build"
        return re.sub(rf"(?<![\w./-])({'|'.join(FOLDERS)})(?![\w-])", rf"{self.root}\1", text)

    @property
    def here(self) -> Path:
        folder = Path(self.below(self.workdir))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        search = self.below(self.environment.get("PATH", "$PATH")).replace("$PATH", f"{self.python}:/usr/bin:/bin")
        return subprocess.run(
            ["/bin/sh", "-c", self.below(command)],
            cwd=self.here,
            env={"HOME": str(Path.home()), **index, "PATH": search},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def copy(self, arguments: str) -> None:
        *sources, target = shlex.split(arguments)
        for source in sources:
            here, there = ROOT / source, self.here / target
            if here.is_dir():
                shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(here, there)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Both stages, built."""
    root = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", str(root / "python")], check=True, timeout=300)
    image = Image(root, root / "python/bin")
    for word, rest in instructions((ROOT / "deploy/docker/Dockerfile").read_text()):
        if word == "WORKDIR":
            image.workdir = rest
        elif word == "COPY" and not rest.startswith("--from"):
            image.copy(rest)
        elif word == "COPY":
            # The second stage takes the folder to the very same place, which is where it lies already.
            assert rest == "--from=build /opt/kvctl /opt/kvctl"
        elif word == "RUN" and rest.startswith("groupadd"):
            continue  # users are in the image's own /etc
        elif word == "RUN":
            done = image.run(rest)
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        elif word == "ENV":
            image.environment.update(pair.split("=", 1) for pair in shlex.split(rest))
        else:
            assert word in OF_THE_IMAGE, f"an instruction that no test knows: {word} {rest}"
            if word == "ENTRYPOINT":
                image.entrypoint = re.findall(r'"([^"]+)"', rest)
    return image


@pytest.mark.timeout(900)
def test_the_image_s_programs_run_and_know_the_operator(image: Image) -> None:
    (entrypoint,) = image.entrypoint
    for command in (f"{entrypoint} --version", "kvctl version", "kvctl-coordinator --operator --version"):
        done = image.run(command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    done = image.run("python -c 'import kopf, sidecar.operator.app, sys; print(sys.prefix)'")
    assert done.stdout.strip() == str(image.root / "opt/kvctl/venv"), done.stderr


@pytest.mark.timeout(900)
def test_the_image_is_slim(image: Image) -> None:
    packages = {path.name for path in (image.root / "opt/kvctl/venv").rglob("site-packages/*")}
    assert "grpc" in packages
    assert not {"torch", "vllm", "numpy", "pytest"} & packages


@pytest.mark.timeout(900)
def test_the_folder_that_pods_copy_has_the_bridge_its_entry_point_and_the_hook_and_nothing_of_the_sidecar(
    image: Image,
) -> None:
    bridge = image.root / "opt/kvctl/bridge"
    assert (bridge / "engine_bridge/plugin.py").is_file()
    assert not list(bridge.glob("sidecar*"))
    look = (
        "import importlib.metadata as m; "
        "(found,) = m.entry_points(group='vllm.general_plugins', name='kvctl'); print(found.value)"
    )
    # -S: without site-packages, so that nothing but the folder can answer.
    done = subprocess.run(
        [sys.executable, "-S", "-c", look], env={"PYTHONPATH": str(bridge)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "engine_bridge.plugin:register", done.stderr
    hook = subprocess.run(
        [sys.executable, str(bridge / "kvctl_wait_idle.py"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert hook.returncode == 0, hook.stderr
