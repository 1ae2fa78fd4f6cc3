"""Slices and pods as they are met in clusters become one row a pod, current through every interruption of the watch."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from apiserver import ApiServer, Refused, serving
from cluster import Cluster, kubeconfig_for

from sidecar.coordinator.discovery import DiscoveryError, kube_access, kubernetes
from sidecar.coordinator.discovery.kube_access import Access
from sidecar.coordinator.discovery.kube_api import Api
from sidecar.coordinator.discovery.kube_rows import EndpointSlice, Pod, from_pods, from_slices
from sidecar.coordinator.discovery.kubernetes import KubernetesDiscovery, from_url
from sidecar.coordinator.discovery.sources import JoinedDiscovery
from sidecar.coordinator.targets import Target

PORTS = [{"name": "kvctl", "port": 7700}]


def endpoint(name: str, *addresses: str, **conditions: bool | None) -> dict[str, Any]:
    return {
        "addresses": list(addresses),
        "conditions": {"ready": True, **conditions},
        "targetRef": {"kind": "Pod", "name": name, "uid": f"uid-{name}"},
        "nodeName": "n1",
    }


def piece(name: str, *endpoints: dict[str, Any], family: str = "IPv4", ports: Any = PORTS) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm-kvctl"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": ports,
    }


def pod(name: str, ip: str = "10.0.0.1", *, ready: bool = True, **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kvctl.dev/sidecar": "true", "pool": "a"}, **meta},
        "spec": {
            "containers": [{"name": "vllm"}],
            "initContainers": [{"name": "kvctl-sidecar", "ports": [{"name": "kvctl", "containerPort": 7700}]}],
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def rows(*slices: dict[str, Any], port: int | None = None) -> tuple[list[Target], list[str]]:
    return from_slices([msgspec.convert(one, EndpointSlice) for one in slices], port, "vllm-kvctl.llm.svc")


# --- rows ------------------------------------------------------------------------------------------------------------


def test_all_slices_of_a_service_are_merged() -> None:
    targets, warnings = rows(piece("a", endpoint("p0", "10.0.0.1")), piece("b", endpoint("p1", "10.0.0.2")))
    assert [(t.name, t.address, t.identity) for t in targets] == [
        ("p0", "10.0.0.1:7700", "uid-p0"),
        ("p1", "10.0.0.2:7700", "uid-p1"),
    ]
    assert not warnings


def test_a_dual_stack_pod_is_one_row() -> None:
    targets, _ = rows(
        piece("v6", endpoint("p0", "fd00::1"), family="IPv6"), piece("v4", endpoint("p0", "10.0.0.1"), family="IPv4")
    )
    assert [t.address for t in targets] == ["10.0.0.1:7700"]


def test_an_ipv6_address_is_bracketed() -> None:
    targets, _ = rows(piece("v6", endpoint("p0", "fd00::1"), family="IPv6"))
    assert [t.address for t in targets] == ["[fd00::1]:7700"]


def test_unknown_readiness_means_ready() -> None:
    (target,), _ = rows(piece("a", endpoint("p0", "10.0.0.1", ready=None)))
    assert target.not_ready == ""


@pytest.mark.parametrize(
    ("conditions", "why"),
    [({"ready": False}, "not ready"), ({"ready": False, "serving": True, "terminating": True}, "terminating")],
)
def test_a_pod_that_must_not_be_called_is_shown_with_the_reason(conditions: dict[str, bool], why: str) -> None:
    (target,), _ = rows(piece("a", endpoint("p0", "10.0.0.1", **conditions)))
    assert why in target.not_ready


def test_an_endpoint_that_moves_between_slices_is_one_row_and_ready() -> None:
    targets, _ = rows(piece("a", endpoint("p0", "10.0.0.1", ready=False)), piece("b", endpoint("p0", "10.0.0.1")))
    assert [t.not_ready for t in targets] == [""]


def test_a_slice_of_host_names_or_without_our_port_is_a_warning_and_not_a_target() -> None:
    targets, warnings = rows(
        piece("fqdn", endpoint("p0", "a.example"), family="FQDN"),
        piece("ports", endpoint("p1", "10.0.0.1"), ports=[{"name": "http", "port": 8000}, {"name": "x", "port": 1}]),
    )
    assert targets == []
    assert len(warnings) == 2


def test_two_pods_that_have_had_one_address_stay_two_rows() -> None:
    gone = endpoint("old", "10.0.0.1", ready=False, terminating=True)
    targets, _ = rows(piece("a", gone, endpoint("new", "10.0.0.1")))
    assert {(t.name, bool(t.not_ready)) for t in targets} == {("old", True), ("new", False)}


def test_pods_give_labels_and_the_port_of_the_native_sidecar() -> None:
    (target,) = from_pods([msgspec.convert(pod("p0"), Pod)], None, "")
    assert (target.address, target.labels["pool"], target.identity) == ("10.0.0.1:7700", "a", "uid-p0")


def test_a_pod_without_an_address_is_shown_and_one_that_has_ended_is_not() -> None:
    pending = pod("p0", "", ready=False)
    ended = {**pod("p1"), "status": {"phase": "Succeeded"}}
    (target,) = from_pods([msgspec.convert(one, Pod) for one in (pending, ended)], None, "")
    assert target.name == "p0"
    assert "no address" in target.not_ready


@pytest.mark.parametrize(
    "url",
    [
        "endpoints:///llm",
        "endpoints://llm/x",
        "pods:///llm",
        "pods:///llm?selector=",
        "pods:///llm?selector=a&x=1",
        "x:///",
    ],
)
def test_a_url_that_is_none_is_told_with_the_forms(url: str) -> None:
    with pytest.raises(DiscoveryError, match="expected endpoints:///"):
        from_url(url, Api(Access("http://127.0.0.1:1")))


# --- lists and watches -----------------------------------------------------------------------------------------------


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def client(api: ApiServer) -> AsyncIterator[Api]:
    client = Api(Access(api.url, "llm"))
    yield client
    await client.close()


async def names(discovery: KubernetesDiscovery) -> list[str]:
    return [target.name for target in (await discovery.targets()).targets]


async def eventually(told: Callable[[], bool]) -> None:
    """Poll for what a background task will do; bounded."""
    async with asyncio.timeout(30):
        while not told():  # noqa: ASYNC110 - what is waited for is the watch's own doing
            await asyncio.sleep(0.01)


async def until(discovery: KubernetesDiscovery, wanted: list[str]) -> None:
    async with asyncio.timeout(30):
        while await names(discovery) != wanted:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)


async def test_without_a_watch_each_question_gets_a_list_of_its_own(api: ApiServer, client: Api) -> None:
    discovery = from_url("endpoints:///llm/vllm-kvctl", client)
    await api.put("endpointslices", piece("a", endpoint("p0", "10.0.0.1")))
    assert await names(discovery) == ["p0"]
    await api.put("endpointslices", piece("b", endpoint("p1", "10.0.0.2")))
    assert await names(discovery) == ["p0", "p1"]


async def test_several_sources_give_each_pod_its_row_once(api: ApiServer, client: Api) -> None:
    await api.put("pods", pod("p0", "", ready=False))
    await api.put("pods", pod("p1", "", ready=False))
    await api.put("pods", pod("p2", "10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z"))
    await api.put("pods", pod("p3", "10.0.0.2"))  # has its address already
    one, other = (
        from_url(f"pods:///llm?selector={label}", client) for label in ("pool%3Da", "kvctl.dev/sidecar%3Dtrue")
    )
    found = (await JoinedDiscovery([one, other]).targets()).targets
    assert [(target.name, bool(target.not_ready)) for target in found] == [
        ("p0", True),
        ("p1", True),
        ("p2", True),
        ("p3", False),
    ]


async def test_slices_of_another_service_are_not_ours(api: ApiServer, client: Api) -> None:
    other = piece("a", endpoint("p0", "10.0.0.1"))
    other["metadata"]["labels"] = {"kubernetes.io/service-name": "other"}
    await api.put("endpointslices", other)
    assert await names(from_url("endpoints:///llm/vllm-kvctl", client)) == []


async def test_a_long_list_is_read_page_by_page(api: ApiServer, client: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE", 2)
    for number in range(5):
        await api.put("pods", pod(f"p{number}", f"10.0.0.{number + 1}"))
    assert len(await names(from_url("pods:///llm?selector=pool%3Da", client))) == 5
    assert api.lists == 3


@pytest.fixture
async def watched(api: ApiServer, client: Api) -> AsyncIterator[KubernetesDiscovery]:
    discovery = from_url("pods:///llm?selector=pool%3Da", client)
    await api.put("pods", pod("p0"))
    discovery.start()
    await until(discovery, ["p0"])
    await eventually(lambda: api.watches > 0)
    yield discovery
    await discovery.stop()


async def test_the_watch_sees_pods_come_change_and_go(api: ApiServer, watched: KubernetesDiscovery) -> None:
    lists = api.lists
    await api.put("pods", pod("p1", "10.0.0.2"))
    await until(watched, ["p0", "p1"])
    await api.put("pods", pod("p1", "10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z"))
    await eventually(lambda: any(one.metadata.deletion_timestamp for one in watched._view.items()))
    assert "terminating" in (await watched.targets()).targets[1].not_ready
    await api.remove("pods", "p1")
    await until(watched, ["p0"])
    assert api.lists == lists, "the watch was enough"


async def test_a_watch_that_the_server_ends_goes_on_from_its_place(
    api: ApiServer, watched: KubernetesDiscovery
) -> None:
    lists, watches = api.lists, api.watches
    await api.end_watches()
    await api.put("pods", pod("p1", "10.0.0.2"))
    await eventually(lambda: api.watches > watches)
    await eventually(lambda: len(watched._view.items()) == 2)
    assert api.lists == lists


async def test_a_forgotten_place_leads_to_a_new_list(api: ApiServer, watched: KubernetesDiscovery) -> None:
    lists = api.lists
    for number in range(3):
        await api.put("pods", pod(f"q{number}"))
    api.objects.pop(("pods", "llm", "p0"))  # its DELETED event is lost with the history
    api.forget()
    await api.end_watches()
    await until(watched, ["q0", "q1", "q2"])
    assert api.lists > lists


async def test_bookmarks_keep_a_quiet_watch_s_place(api: ApiServer, watched: KubernetesDiscovery) -> None:
    """Events of other objects move the server's history on; a bookmark moves the watch's place with it."""
    for number in range(3):
        await api.put("leases", {"metadata": {"name": f"l{number}"}})
    await eventually(lambda: watched._view._version == str(api.history[-1][0]))


async def test_an_api_server_that_is_away_leaves_the_pods_seen_before_and_says_incomplete(
    api: ApiServer, client: Api
) -> None:
    discovery = from_url("pods:///llm?selector=pool%3Da", client)
    await api.put("pods", pod("p0"))
    assert not (await discovery.targets()).incomplete

    async def away(_method: str, _path: str) -> None:
        raise Refused(503, "ServiceUnavailable", "etcd has no leader")

    api.faults = away
    found = await discovery.targets()
    assert [t.name for t in found.targets] == ["p0"]
    assert found.incomplete
    assert "etcd has no leader" in found.warnings[0]


async def test_an_api_server_that_never_answered_is_an_error(client: Api, api: ApiServer) -> None:
    async def away(_method: str, _path: str) -> None:
        raise Refused(403, "Forbidden", "pods is forbidden")

    api.faults = away
    with pytest.raises(DiscoveryError, match=r"pods is forbidden.*needs list and watch"):
        await from_url("pods:///llm?selector=pool%3Da", client).targets()


async def test_a_rotated_token_is_picked_up(api: ApiServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    api.token = "one"
    client = Api(Access(api.url, "llm", token_file=file))
    discovery = from_url("pods:///llm?selector=pool%3Da", client)
    await api.put("pods", pod("p0"))
    assert await names(discovery) == ["p0"]
    api.token = "two"
    assert (await discovery.targets()).incomplete
    file.write_text("two\n")
    assert not (await discovery.targets()).incomplete
    await client.close()


async def test_who_asks_during_a_list_gets_that_one(api: ApiServer, client: Api) -> None:
    """Of two lists at once the older might end last, and hide what the newer has seen until the next resync."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(_method: str, _path: str) -> None:
        reached.set()
        await go.wait()

    await api.put("pods", pod("p0"))
    api.faults = slow
    discovery = from_url("pods:///llm?selector=pool%3Da", client)
    first = asyncio.create_task(names(discovery))
    await asyncio.wait_for(reached.wait(), 30)
    second = asyncio.create_task(names(discovery))
    await asyncio.sleep(0)
    first.cancel()  # who gives up takes nothing from the other
    go.set()
    assert await asyncio.wait_for(second, 30) == ["p0"]
    assert len(api.requests) == 1


async def test_rows_are_made_once_for_each_change(api: ApiServer, watched: KubernetesDiscovery) -> None:
    one, two = await watched.targets(), await watched.targets()
    assert one.targets is two.targets
    await api.put("pods", pod("p1", "10.0.0.2"))
    await until(watched, ["p0", "p1"])


async def test_an_answer_that_no_api_server_gives_is_trouble_and_does_not_end_the_watch(
    api: ApiServer, watched: KubernetesDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pages = Api.request, [b"<html>sign in</html>", b'{"items": [{"metadata": 7}]}']

    async def proxied(self: Api, method: str, path: str, **more: Any) -> bytes:
        return pages.pop() if pages else await real(self, method, path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Api, "request", proxied)
    api.forget()
    await api.end_watches()
    await eventually(lambda: not pages)
    await api.put("pods", pod("p1", "10.0.0.2"))
    await until(watched, ["p0", "p1"])


async def test_an_unreadable_token_names_path_and_uid_and_recovers_when_mended(api: ApiServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    client = Api(Access(api.url, "llm", token_file=file))
    discovery = from_url("pods:///llm?selector=pool%3Da", client)
    with pytest.raises(DiscoveryError, match=rf"{file}.*uid \d+"):
        await discovery.targets()
    file.write_text("now\n")
    assert await names(discovery) == []
    await client.close()


# --- access ----------------------------------------------------------------------------------------------------------


def test_a_pod_finds_its_api_server_also_over_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("llm\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    access = kube_access.in_cluster(tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "llm")


def test_a_kubeconfig_s_current_context_is_used(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(
        "current-context: b\n"
        "contexts: [{name: b, context: {cluster: c, user: u, namespace: llm}}]\n"
        "clusters: [{name: c, cluster: {server: 'https://api:6443/', certificate-authority: ca.crt}}]\n"
        "users: [{name: u, user: {tokenFile: token}}]\n"
    )
    access = kube_access.from_kubeconfig(path)
    assert access.server == "https://api:6443"
    assert (access.ca_file, access.token_file) == (tmp_path / "ca.crt", tmp_path / "token")


def a_kubeconfig(
    cluster: str = "server: 'https://api:6443'", user: str = "", context: str = "cluster: c, user: u"
) -> str:
    return (
        f"{{current-context: b, contexts: [{{name: b, context: {{{context}}}}}], "
        f"clusters: [{{name: c, cluster: {{{cluster}}}}}], users: [{{name: u, user: {{{user}}}}}]}}"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x: [", "it is not YAML, line 1: "),
        ("[" * 5000, "it is not YAML: too deep"),
        ("\xff\xfe", "it is not UTF-8 text; expected YAML"),
        ("", "it is empty; expected clusters, users, contexts and current-context"),
        ("hello", "it holds a str, not a mapping; expected clusters"),
        ("{}", "it names no current-context; it has no contexts at all"),
        ("{contexts: [{name: b}, {name: a}]}", "it names no current-context; choose one with .*: a, b"),
        ("{current-context: b}", "no context is named 'b'; it has no contexts at all"),
        ("{current-context: b, contexts: {}}", "no context is named 'b'"),
        ("{current-context: b, contexts: x}", "contexts is no list"),
        ("{current-context: b, contexts: [{name: a}]}", "no context is named 'b'; choose one with .*: a$"),
        ("{current-context: b, contexts: [{name: b}]}", "context 'b' is empty"),
        (a_kubeconfig(context="user: u"), "context 'b': it has no cluster"),
        (a_kubeconfig(context="cluster: x"), "no cluster is named 'x'; there: c"),
        (a_kubeconfig(context="cluster: c, user: x"), "no user is named 'x'; there: u"),
        (a_kubeconfig("proxy-url: x"), "cluster 'c': it has no server"),
        (a_kubeconfig("server: 'api:6443'"), "cluster 'c': server is 'api:6443'; expected a URL, e.g. https"),
        (a_kubeconfig(user="token: 1234"), "user 'u': token is no text but int; put it in quotes"),
        (a_kubeconfig(user='token: "a\\nb"'), "user 'u': token is not one word of ASCII"),
        (a_kubeconfig(user='token: "\\u00e4"'), "user 'u': token is not one word of ASCII"),
        (
            a_kubeconfig(user="client-key-data: abc"),
            r"user 'u': client-key-data is not base64 \(Incorrect padding\); expected a PEM file, encoded",
        ),
        (
            a_kubeconfig("server: 'https://api', certificate-authority-data: /+8="),
            "cluster 'c': certificate-authority-data is base64 of something that is no PEM file",
        ),
        (a_kubeconfig(user="exec: {command: x}"), "its user logs in by a plugin, which is not supported; use a token"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_names_the_file_what_was_found_and_what_was_expected(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "config"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DiscoveryError, match=f"^kubeconfig {path}: {why}"):
        kube_access.from_kubeconfig(path)


def test_a_kubeconfig_that_is_not_there_names_the_file_and_the_uid(tmp_path: Path) -> None:
    with pytest.raises(
        DiscoveryError, match=rf"^kubeconfig {tmp_path}/none: it cannot be read by uid \d+: No such file"
    ):
        kube_access.from_kubeconfig(tmp_path / "none")


@pytest.mark.parametrize("named", [":{}", "{}:", "/does/not/exist:{}:/neither"])
def test_of_several_kubeconfigs_the_first_that_is_there_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    path = tmp_path / "config"
    path.write_text(a_kubeconfig())
    monkeypatch.setenv("KUBECONFIG", named.format(path))
    assert kube_access.find().server == "https://api:6443"


def test_inline_certificates_and_a_user_without_credentials_are_read(tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"
    path = tmp_path / "config"
    data = base64.b64encode(pem.encode()).decode()
    path.write_text(a_kubeconfig(f"server: 'https://api', certificate-authority-data: {data}", context="cluster: c"))
    access = kube_access.from_kubeconfig(path)
    assert (access.ca_data, access.token, access.cert_data, access.namespace) == (pem, "", b"", "default")


async def test_the_command_line_finds_pods_and_leaves_no_connection_open(cluster: Cluster, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubeconfig_for(cluster.api.url))
    words = ["replicas", "--target", "pods:///llm?selector=kvctl.dev/sidecar%3Dtrue", "-o", "name"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar.cli.main", *words),
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (out.decode().split(), err.decode()) == ([fake.name for fake in cluster.fakes], "")
