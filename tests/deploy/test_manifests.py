"""The manifests render with kubectl, satisfy Kubernetes' own schemas, and hold what running in a pod needs."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from foreign_kinds import SCHEMAS as FOREIGN
from foreign_kinds import problems
from programs import program

from engine_bridge import __version__

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = ("development", "production")

Manifest = dict[str, Any]


def render(path: Path) -> list[Manifest]:
    done = subprocess.run([program("kubectl"), "kustomize", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(DEPLOY / "kustomize/overlays" / request.param)


@pytest.fixture(scope="module")
def production() -> list[Manifest]:
    return render(DEPLOY / "kustomize/overlays/production")


def of_kind(manifests: list[Manifest], kind: str, name: str | None = None) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]


def pods(manifests: list[Manifest]) -> list[Manifest]:
    return [m["spec"]["template"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def replica_pod(manifests: list[Manifest]) -> Manifest:
    return of_kind(manifests, "Deployment", "vllm")[0]["spec"]["template"]


def container(pod: Manifest, name: str) -> Manifest:
    return next(c for c in containers(pod) if c["name"] == name)


def test_everything_satisfies_the_schemas_of_kubernetes(rendered: list[Manifest]) -> None:
    assert rendered
    for manifest in rendered:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_kinds_of_cert_manager_and_of_the_prometheus_operator_satisfy_theirs(production: list[Manifest]) -> None:
    foreign = [manifest for manifest in production if manifest["kind"] in FOREIGN]
    assert {manifest["kind"] for manifest in foreign} == set(FOREIGN)
    assert [(m["kind"], m["metadata"]["name"], said) for m in foreign for said in problems(m)] == []


def put(path: str, value: Any, manifest: Manifest) -> None:
    *way, last = path.split(".")
    for part in way:
        manifest = manifest[int(part)] if part.isdigit() else manifest[part]
    manifest[last] = value


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Certificate", "spec.dnsName", ["kvctl"]),
        ("Certificate", "spec.renewBefore", "10 days"),
        ("Certificate", "spec.usages", ["server-auth"]),
        ("Certificate", "spec.issuerRef", {}),
        ("Issuer", "spec.ca", {"secret": "kvctl-ca"}),
        ("PodMonitor", "spec.podMetricsEndpoints.0.interval", "15 s"),
        ("PodMonitor", "spec.endpoints", []),
        ("PrometheusRule", "spec.groups.0.rules.0.alert", "AlsoARecord"),
        ("PrometheusRule", "spec.groups.1.rules.0.for", "1 minute"),
        ("PrometheusRule", "spec.groups.0.every", "30s"),
    ],
)
def test_a_field_that_they_do_not_know_would_be_caught(
    production: list[Manifest], kind: str, path: str, value: Any
) -> None:
    manifest = copy.deepcopy(of_kind(production, kind)[0])
    put(path, value, manifest)
    assert problems(manifest)


def test_a_field_that_kubernetes_does_not_know_would_be_caught(rendered: list[Manifest]) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [], "enableServiceLink": 1},
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.37", strict=True)


def test_everything_is_in_one_namespace(rendered: list[Manifest]) -> None:
    clusterwide = {"Namespace", "CustomResourceDefinition", "ClusterRole"}
    namespaces = {m["metadata"].get("namespace") for m in rendered if m["kind"] not in clusterwide}
    assert len(namespaces) == 1
    assert None not in namespaces


def test_the_sidecar_is_native_and_comes_before_the_engine(rendered: list[Manifest]) -> None:
    pod = replica_pod(rendered)
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["kvctl-bridge", "kvctl-sidecar"]
    assert container(pod, "kvctl-sidecar")["restartPolicy"] == "Always"


def test_a_starting_engine_does_not_hold_up_the_sidecar_it_waits_for(rendered: list[Manifest]) -> None:
    probes = container(replica_pod(rendered), "kvctl-sidecar")
    assert probes["startupProbe"]["httpGet"]["path"] == "/livez"
    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert probes[probe]["httpGet"]["port"] == "kvctl-metrics"
        assert "scheme" not in probes[probe]["httpGet"], "kubelet brings no client certificate"


def test_engine_and_sidecar_share_the_socket_through_a_group_and_not_through_root(rendered: list[Manifest]) -> None:
    pod = replica_pod(rendered)
    group = pod["spec"]["securityContext"]["fsGroup"]
    engine, sidecar = container(pod, "vllm"), container(pod, "kvctl-sidecar")
    variables = {v["name"]: v.get("value") for v in engine["env"]}
    assert variables["KVCTL_ENGINE_GROUP"] == str(group)
    assert sidecar["securityContext"]["runAsGroup"] == group
    assert f"--engine-dir={variables['KVCTL_ENGINE_DIR']}" in sidecar["args"]
    mounts = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]}["kvctl-engine"] for c in (engine, sidecar)]
    assert mounts == ["/run/kvctl", "/run/kvctl"]
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "kvctl-engine")
    assert "emptyDir" in volume


def test_operator_sidecar_and_bridge_are_one_image_of_this_version(rendered: list[Manifest]) -> None:
    images = [one["image"] for pod in pods(rendered) for one in containers(pod) if one["image"].startswith("kvctl")]
    assert images == [f"kvctl:{__version__}"] * 3


def test_our_containers_are_not_root_and_cannot_become_it(rendered: list[Manifest]) -> None:
    checked = 0
    for pod in pods(rendered):
        for one in containers(pod):
            if not one["image"].startswith("kvctl"):
                continue
            own = {**pod["spec"].get("securityContext", {}), **one["securityContext"]}
            assert own["runAsNonRoot"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "limits" in one["resources"]
            checked += 1
    assert checked == 3


def test_service_links_do_not_inject_kvctl_port(rendered: list[Manifest]) -> None:
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(rendered))


def test_sidecar_engine_and_operator_do_not_share_a_port(rendered: list[Manifest]) -> None:
    for pod in pods(rendered):
        ports = [port["containerPort"] for one in containers(pod) for port in one.get("ports", [])]
        names = [port["name"] for one in containers(pod) for port in one.get("ports", [])]
        assert len(set(ports)) == len(ports)
        assert len(set(names)) == len(names)


def test_only_the_operator_reaches_the_api_server_and_only_in_its_namespace(rendered: list[Manifest]) -> None:
    assert not of_kind(rendered, "ClusterRoleBinding")
    (binding,) = of_kind(rendered, "RoleBinding")
    assert [s["name"] for s in binding["subjects"]] == ["kvctl-operator"]
    (role,) = of_kind(rendered, "Role")
    verbs = {(g, r): set(rule["verbs"]) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"]}
    assert "*" not in str(verbs)
    assert not {"secrets", "configmaps", "deployments"} & {resource for _, resource in verbs}
    assert verbs["", "pods"] == {"list", "watch", "patch"}
    assert replica_pod(rendered)["spec"]["automountServiceAccountToken"] is False


def test_the_policy_lets_operator_and_scraper_in_and_nobody_else_to_the_sidecar(rendered: list[Manifest]) -> None:
    (policy,) = of_kind(rendered, "NetworkPolicy", "kvctl-sidecar")
    rules = {port["port"]: rule.get("from") for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert rules[7700] is not None
    assert rules[7701] is not None
    labels = replica_pod(rendered)["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_replica_in_production_speaks_mutual_tls_only(production: list[Manifest]) -> None:
    args = container(replica_pod(production), "kvctl-sidecar")["args"]
    assert "--insecure" not in args
    assert {"--tls-cert", "--tls-key", "--tls-client-ca"} <= {arg.split("=")[0] for arg in args}
    secrets = {c["spec"]["secretName"] for c in of_kind(production, "Certificate")}
    mounted = {v["secret"]["secretName"] for pod in pods(production) for v in pod["spec"]["volumes"] if "secret" in v}
    assert mounted <= secrets


def test_the_pod_monitors_scrape_kvctl_and_vllm_from_one_pod(production: list[Manifest]) -> None:
    pod = replica_pod(production)
    ports = {port["name"] for one in containers(pod) for port in one.get("ports", [])}
    monitors = of_kind(production, "PodMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_our_containers_listen_on_every_address_of_their_pod_whatever_family_the_cluster_has(
    rendered: list[Manifest],
) -> None:
    words = [word for pod in pods(rendered) for one in containers(pod) for word in one.get("args", [])]
    places = [word.partition("=")[2] for word in words if word.startswith(("--listen=", "--metrics="))]
    assert len(places) == 3
    assert {place.rpartition(":")[0] for place in places} == {"[::]"}


def test_the_headless_service_leads_to_each_sidecar(rendered: list[Manifest]) -> None:
    (service,) = of_kind(rendered, "Service", "vllm-kvctl")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["targetPort"] == "kvctl"


def test_the_two_sidecar_patches_differ_in_kind_only() -> None:
    folder = DEPLOY / "kustomize/components/sidecar"
    deployment = (folder / "sidecar-patch.yaml").read_text()
    assert (folder / "sidecar-patch-statefulset.yaml").read_text() == deployment.replace(
        "kind: Deployment", "kind: StatefulSet", 1
    )


def test_generated_files_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.observability.generate", "--check"],
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_dockerfile_has_nothing_to_complain_about() -> None:
    command = [program("hadolint"), "--config", "deploy/docker/.hadolint.yaml", "deploy/docker/Dockerfile"]
    done = subprocess.run(command, cwd=DEPLOY.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_image_has_no_engine_in_it_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    final = text[text.rindex("\nFROM ") :]
    assert "USER 7700:7700" in final
    assert "torch" not in text.replace("no torch", "")
    assert 'ENTRYPOINT ["kvctl-sidecar"]' in final


def test_a_folder_without_a_wheel_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other-1.0.whl", "w") as other:
        other.writestr("x", "")
    bundle = [sys.executable, str(DEPLOY / "docker/bridge_bundle.py"), str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(bundle, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "expected one kvctl wheel, found none" in done.stderr
