"""The two pages that tests walk command by command: what is on them, and who runs what.

Every line of a console block is either run by a walk (`HOST`: on this machine; `CLUSTER`: real kubectl and an API
server) or named here with the reason why it is not, and with the test that does the same by other means.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "docs/install.md"
KUBERNETES = ROOT / "docs/kubernetes.md"

_PROGRAM = re.compile(r"(PYTHONPATH=\S+ )?(kvctl(-sidecar|-coordinator)?|kubectl|pip|python|make|docker|promtool) ")


def blocks(page: Path) -> list[str]:
    """Indented blocks, without their indentation."""
    found = re.findall(r"(?:^ {4,}\S[^\n]*\n(?:^ *\n(?=^ {4,}\S))?)+", page.read_text(), re.MULTILINE)
    return [re.sub(rf"^ {{{len(one) - len(one.lstrip())}}}", "", one, flags=re.MULTILINE).rstrip("\n") for one in found]


def commands(page: Path) -> list[str]:
    """Lines of blocks that hold commands."""
    return [line for block in blocks(page) if _PROGRAM.match(block) for line in block.splitlines() if line]


def file_block(page: Path, head: str) -> str:
    """The block that is a file, by its first line, e.g. "# fleet.yaml"."""
    (found,) = [block for block in blocks(page) if block.startswith(head)]
    return found + "\n"


NOT_WALKED = {
    "make demo": "minutes of real load; tests/e2e/test_demo.py runs it",
    "pip install .": "needs an index for what kvctl depends on; test_dockerfile installs the wheel with pip",
    "docker build -f deploy/docker/Dockerfile -t registry.example/kvctl:0.1.0 .": "needs Docker; test_dockerfile takes "
    "its instructions one by one",
    "docker push registry.example/kvctl:0.1.0": "needs Docker and a registry",
    "promtool check rules deploy/observability/prometheus/kvctl.rules.yaml": "test_alert_rules runs it",
    "kubectl auth can-i create cacheoperations.kvctl.dev -n kvctl-demo": "needs an API server that judges rights; "
    "test_operator holds the Role against every request of the operator",
}

WHEEL = "pip wheel --no-deps -w dist ."
SERVE = "PYTHONPATH=/opt/kvctl/bridge vllm serve MODEL"

HOST = [
    WHEEL,
    "python deploy/docker/bridge_bundle.py dist /opt/kvctl/bridge",
    SERVE,
    "kvctl-sidecar --name r0 --check",
    "kvctl-sidecar --name r0",
    "kvctl doctor --target 127.0.0.1:7700",
    "kvctl admission --target 127.0.0.1:7700",
    "kvctl reset --mode keep --target 127.0.0.1:7700",
    "kvctl-sidecar --name r0 --listen 0.0.0.0:7700 --tls-cert r0.crt --tls-key r0.key --tls-client-ca ca.crt "
    "--client-role ops=operator",
    "kvctl replicas --inventory fleet.yaml --ca ca.crt --cert ops.crt --key ops.key",
    "kvctl reset --mode keep --rolling --max-unavailable 25% --inventory fleet.yaml --ca ca.crt --cert ops.crt "
    "--key ops.key",
    "kvctl-coordinator --inventory fleet.yaml --store /var/lib/kvctl/operations.db --replica-ca ca.crt "
    "--replica-cert ops.crt --replica-key ops.key",
    "kvctl reset --mode keep --coordinator 127.0.0.1:7710",
    "kvctl ops list --coordinator 127.0.0.1:7710",
    "python -m deploy.observability.generate --runbook-base https://wiki.example/kvctl",
]
"""In the order of the installation page. What concerns one replica is walked beside a real vLLM; all but SERVE beside a
model of an engine, which is there at once.
"""

DEVELOPMENT = "deploy/kustomize/overlays/development"
INSTALLING = [
    f"kubectl kustomize {DEVELOPMENT}",
    f"kubectl apply -k {DEVELOPMENT}",
    "kubectl -n kvctl-demo get pods",
    "kubectl -n kvctl-demo create -f deploy/hooks/cacheoperation.yaml",
    "kubectl -n kvctl-demo get cacheoperations",
    "kubectl -n kvctl-demo describe cop",
]
TAKING_OUT = f"kubectl delete -k {DEVELOPMENT}"
CLUSTER = [command for command in commands(KUBERNETES) if command not in NOT_WALKED]
"""The whole of the other page, in its order, between the two."""
