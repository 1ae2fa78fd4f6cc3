"""The installation page's commands and files are ones that exist and that the programs take."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pages import INSTALL, ROOT, file_block
from programs import program

from sidecar.coordinator import config as coordinator_config
from sidecar.replica import config as replica_config

PAGE = INSTALL.read_text()
SERVERS = {
    "kvctl-sidecar": replica_config.load,
    "kvctl-coordinator": coordinator_config.load,
}


def lines_of(name: str) -> list[str]:
    found = re.findall(rf"^ {{4,}}({name} [^\n]+)$|`({name} [^`]+)`", PAGE, re.MULTILINE)
    return [a or b for a, b in found]


@pytest.mark.parametrize("line", [line for name in SERVERS for line in lines_of(name)])
def test_a_server_takes_the_options_the_page_gives_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet.yaml").write_text(file_block(INSTALL, "# fleet.yaml"))
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(line)
    SERVERS[name](words, {})


def test_the_page_does_start_servers() -> None:
    assert len(lines_of("kvctl-sidecar")) >= 3
    assert len(lines_of("kvctl-coordinator")) >= 1


def test_every_path_of_the_repository_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\b((?:deploy|docs)/[\w./-]+)", PAGE.replace("/opt/kvctl/", "")))
    assert len(named) > 6
    assert [path for path in named if not (ROOT / path.rstrip("./")).exists()] == []


def test_the_overlays_that_the_page_applies_render() -> None:
    for path in set(re.findall(r"-k (\S+)|kustomize (deploy\S+)", PAGE)):
        done = subprocess.run(
            [program("kubectl"), "kustomize", str(ROOT / (path[0] or path[1]))], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_the_example_inventory_is_one(tmp_path: Path) -> None:
    from sidecar.coordinator.inventory import load_inventory

    file = tmp_path / "fleet.yaml"
    file.write_text(file_block(INSTALL, "# fleet.yaml"))
    assert [target.name for target in load_inventory(file)] == ["r0", "r1"]


def test_prometheus_takes_the_example_scrape_configuration(tmp_path: Path) -> None:
    folder = ROOT / "deploy/observability/prometheus"
    content = yaml.safe_load((folder / "scrape-static.yaml").read_text())
    content["rule_files"] = [str(folder / name) for name in content["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [program("promtool"), "check", "config", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_s_deployment_passes_options_that_the_operator_takes() -> None:
    from sidecar.operator import config

    documents = yaml.safe_load_all((ROOT / "deploy/kustomize/base/operator.yaml").read_text())
    container = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][0] == "--operator"
    words = [word.replace("$(POD_NAMESPACE)", "llm").replace("$(POD_NAME)", "op-0") for word in container["args"][1:]]
    loaded = config.load(words, {})
    assert loaded.discovery == ["pods:///llm?selector=kvctl.dev%2Fsidecar%3Dtrue"]
    assert str(loaded.metrics) == "[::]:7711"


@pytest.mark.parametrize("overlay", ["development", "production"])
def test_rendered_containers_get_options_that_their_programs_take(overlay: str) -> None:
    from sidecar.operator import config

    done = subprocess.run(
        [program("kubectl"), "kustomize", str(ROOT / "deploy/kustomize/overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    seen = 0
    for manifest in yaml.safe_load_all(done.stdout):
        if manifest["kind"] != "Deployment":
            continue
        spec = manifest["spec"]["template"]["spec"]
        for one in [*spec.get("initContainers", []), *spec["containers"]]:
            words = [re.sub(r"\$\(\w+\)", "x", word) for word in one.get("args", [])]
            if one.get("command") == ["kvctl-sidecar"]:
                replica_config.load(words, {})
                seen += 1
            elif one.get("command") == ["kvctl-coordinator"]:
                config.load(words[1:], {})
                seen += 1
    assert seen == 2


# --- the components in a kustomization of one's own ------------------------------------------------------------------

HOME = "github.com/kvctl/kvctl/"
"""Where the page takes the components from; a test takes them from this checkout."""


def workload(kind: str, *, labelled: bool = True) -> dict[str, Any]:
    """A vLLM as people have it: with an init container, a volume and variables of its own."""
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.33.0",
        "args": ["--model", "/models/mine"],
        "env": [{"name": "HF_HOME", "value": "/models"}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    pod = {
        "initContainers": [{"name": "download", "image": "download:1", "args": ["mine"]}],
        "containers": [container, {"name": "proxy", "image": "proxy:1"}],
        "volumes": [{"name": "models", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "mine", "labels": {"kvctl.dev/inject": "true"} if labelled else {}},
        "spec": {
            "selector": {"matchLabels": {"app": "mine"}},
            "template": {"metadata": {"labels": {"app": "mine"}}, "spec": pod},
            **({"serviceName": "mine"} if kind == "StatefulSet" else {}),
        },
    }


def own_kustomization(folder: Path, workload: dict[str, Any], *, tls: bool = True) -> list[dict[str, Any]]:
    """What the page's blocks make of a workload. Without `tls`, with the patch that it names in its place."""
    content: dict[str, Any] = {"resources": ["mine.yaml"]}
    for head in ("components:", "images:"):
        content |= yaml.safe_load(file_block(INSTALL, head))
    here = os.path.relpath(ROOT, folder.resolve())
    assert all(component.startswith(HOME) for component in content["components"])
    content["components"] = [f"{here}/{component.removeprefix(HOME)}" for component in content["components"]]
    if not tls:
        content["components"] = [one for one in content["components"] if not one.endswith("/tls")]
        overlay = ROOT / "deploy/kustomize/overlays/development/kustomization.yaml"
        content["patches"] = yaml.safe_load(overlay.read_text())["patches"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(workload))
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([program("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
@pytest.mark.parametrize("tls", [True, False])
def test_the_components_bring_the_sidecar_into_a_workload_of_one_s_own(tmp_path: Path, kind: str, tls: bool) -> None:
    manifests = own_kustomization(tmp_path, workload(kind), tls=tls)
    (mine,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    kubernetes_validate.validate(mine, "1.37", strict=True)
    spec = mine["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["initContainers"]] == ["kvctl-bridge", "kvctl-sidecar", "download"]
    assert [one["name"] for one in spec["containers"]] == ["vllm", "proxy"]
    sidecar, engine = spec["initContainers"][1], spec["containers"][0]
    assert sidecar["image"].startswith("registry.example/kvctl:")
    config = replica_config.load([re.sub(r"\$\(\w+\)", "x", word) for word in sidecar["args"]], {})
    assert (config.tls_cert is not None, config.insecure) == (tls, not tls)
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for one in (sidecar, engine) for mount in one["volumeMounts"]} <= volumes
    assert {variable["name"] for variable in engine["env"]} > {"HF_HOME", "PYTHONPATH", "KVCTL_ENGINE_DIR"}
    assert engine["args"] == ["--model", "/models/mine"]
    assert any(manifest["kind"] == "Certificate" for manifest in manifests) == tls


def test_a_workload_without_the_label_is_left_as_it_is(tmp_path: Path) -> None:
    was = workload("Deployment", labelled=False)
    manifests = own_kustomization(tmp_path, was)
    (mine,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    assert mine["spec"] == was["spec"]
