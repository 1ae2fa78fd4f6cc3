"""Replicas in Kubernetes, by the EndpointSlices of a service or by a label selector over pods.

    endpoints:///NAMESPACE/SERVICE[:PORT]
    pods:///NAMESPACE?selector=app%3Dvllm[&port=7700]

A list says what is there, a watch keeps it current. The watch is what can break without anybody noticing: it ends
every few minutes, its place can be forgotten by the server (410 Gone), a connection can go silent. So every end leads
to another watch from the last place, a forgotten place to a new list, and a list is made afresh every now and then in
any case. Whoever asks while the view is not current gets a list of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from sidecar.coordinator.discovery import DiscoveryError, SourceError, kube_rows
from sidecar.coordinator.discovery.kube_api import Api, ApiError
from sidecar.coordinator.discovery.kube_rows import EndpointSlice, Meta, Pod
from sidecar.coordinator.targets import Discovered, Target

LOG: Final = logging.getLogger(__name__)

RESYNC_S: Final = 600.0
"""A new list at least this often, in case an event was lost."""

PAGE: Final = 500
_BACKOFF_FIRST_S: Final = 0.2
_BACKOFF_MOST_S: Final = 15.0

Item = TypeVar("Item", bound=EndpointSlice | Pod)
Read = TypeVar("Read")


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Bookmark(msgspec.Struct):
    metadata: Meta


class View(Generic[Item]):
    """One collection of objects, listed and kept current by a watch while `run` runs."""

    def __init__(self, api: Api, path: str, selector: str, kind: type[Item]) -> None:
        """`path`: of the collection, e.g. "/api/v1/namespaces/llm/pods". `selector`: a label selector, or empty."""
        self._api = api
        self._path = path
        self._selector = selector
        self._kind = kind
        self._items: dict[str, Item] = {}
        self._version = ""
        self._listing: asyncio.Task[None] | None = None
        self.current = False
        """Whether the view can be trusted now: listed, and a watch is open."""
        self.lists = 0
        """Lists made so far."""
        self.changes = 0
        """Grows with every change of the items."""

    def items(self) -> list[Item]:
        """What is there, as last seen."""
        return list(self._items.values())

    async def refresh(self) -> list[Item]:
        """List, and remember. ApiError when that fails; the view then keeps what it had.

        Who asks during a list gets that one: of two at once the older might end last, and hide what the newer has seen.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
        await asyncio.shield(self._listing)
        return self.items()

    async def _list(self) -> None:
        items: dict[str, Item] = {}
        page = ""
        while True:
            params = {"limit": str(PAGE)}
            if self._selector:
                params["labelSelector"] = self._selector
            if page:
                params["continue"] = page
            answer = self._read(await self._api.request("GET", self._path, params=params), _List)
            for raw in answer.items:
                item = self._read(raw, self._kind)
                items[item.metadata.uid or item.metadata.name] = item
            page = answer.metadata.continue_
            if not page:
                break
        self._items = items
        self._version = answer.metadata.resource_version
        self.lists += 1
        self.changes += 1

    async def run(self) -> None:
        """List and watch until cancelled."""
        backoff = _BACKOFF_FIRST_S
        while True:
            try:
                await self.refresh()
                backoff = _BACKOFF_FIRST_S
                async with asyncio.timeout(RESYNC_S * random.uniform(0.9, 1.1)):  # noqa: S311 - spreads the load
                    await self._follow()
            except TimeoutError:
                continue  # time for a new list
            except (ApiError, DiscoveryError) as error:
                self.current = False
                if isinstance(error, ApiError) and error.status == 410:
                    continue
                LOG.warning("%s: %s; trying again in %.1f s", self._path, error, backoff)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff = min(backoff * 2, _BACKOFF_MOST_S)
            finally:
                self.current = False

    async def _follow(self) -> None:
        """Watches, one after another, each from where the last one ended."""
        while True:
            params = {"resourceVersion": self._version}
            if self._selector:
                params["labelSelector"] = self._selector
            self.current = True
            async for event in self._api.watch(self._path, params):
                if event.type == "BOOKMARK":
                    self._version = self._read(event.object, _Bookmark).metadata.resource_version
                    continue
                item = self._read(event.object, self._kind)
                key = item.metadata.uid or item.metadata.name
                if event.type == "DELETED":
                    self._items.pop(key, None)
                else:
                    self._items[key] = item
                self.changes += 1
                self._version = item.metadata.resource_version or self._version
            # A server that ends watches at once must not be asked in a tight loop.
            await asyncio.sleep(_BACKOFF_FIRST_S)

    def _read(self, content: bytes | msgspec.Raw, kind: type[Read]) -> Read:
        """ApiError for what no Kubernetes API says, such as the page of a proxy."""
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise ApiError(0, "Unreadable", f"{self._path}: the answer cannot be read: {error}") from error


class KubernetesDiscovery:
    """Targets from one view. Works unstarted (a list for each question) and started (a watch keeps the view)."""

    def __init__(
        self, view: View[EndpointSlice] | View[Pod], rows: Callable[[], tuple[list[Target], list[str]]], what: str
    ) -> None:
        """Made by `from_url`."""
        self._view = view
        self._rows = rows
        self._what = what
        self._kept: tuple[tuple[Target, ...], tuple[str, ...]] = ((), ())
        self._rows_of = -1
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the view current in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._view.run())

    async def stop(self) -> None:
        """End the watch."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def targets(self) -> Discovered:
        """Every pod, also those that must not be called. DiscoveryError when nothing was ever seen."""
        trouble = ""
        if not self._view.current:
            try:
                await self._view.refresh()
            except ApiError as error:
                if not self._view.lists:
                    raise DiscoveryError(f"{self._what}: {_advice(error)}") from error
                trouble = f"{self._what}: {error}; the pods seen before are used"
        targets, warnings = self._made()
        return Discovered(
            targets, incomplete=bool(trouble or warnings), warnings=(*((trouble,) if trouble else ()), *warnings)
        )

    def _made(self) -> tuple[tuple[Target, ...], tuple[str, ...]]:
        """Rows and warnings, made once for each change: who runs an operation asks before each of its calls."""
        if self._rows_of != self._view.changes:
            targets, warnings = self._rows()
            self._kept = tuple(targets), tuple(warnings)
            self._rows_of = self._view.changes
        return self._kept

    def describe(self) -> str:
        """The source."""
        return self._what


def from_url(url: str, api: Api, server_name: str = "") -> KubernetesDiscovery:
    """A discovery for an endpoints:/// or pods:/// URL; SourceError when it is neither.

    `server_name`: name expected in the sidecars' certificates; pods are dialled by address, which no certificate has.
    """
    parts = urlsplit(url)
    if parts.scheme == "endpoints":
        return _of_service(url, parts.path, api, server_name)
    if parts.scheme == "pods":
        return _of_pods(url, parts.path, parts.query, api, server_name)
    raise SourceError(_expected(url))


def _of_service(url: str, path: str, api: Api, server_name: str) -> KubernetesDiscovery:
    found = re.fullmatch(r"/([a-z0-9.-]+)/([a-z0-9.-]+)(?::([0-9]{1,5}))?", path)
    if found is None:
        raise SourceError(_expected(url))
    namespace, service, port = found[1], found[2], int(found[3]) if found[3] else None
    view = View(
        api,
        f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices",
        f"kubernetes.io/service-name={service}",
        EndpointSlice,
    )
    name = server_name or f"{service}.{namespace}.svc"
    return KubernetesDiscovery(
        view, lambda: kube_rows.from_slices(view.items(), port, name), f"service {namespace}/{service}"
    )


def _of_pods(url: str, path: str, query: str, api: Api, server_name: str) -> KubernetesDiscovery:
    options = parse_qs(query, keep_blank_values=True)
    namespace, selector, port = path.strip("/"), options.pop("selector", [""])[0], options.pop("port", [""])[0]
    if not re.fullmatch(r"[a-z0-9.-]+", namespace) or not selector or options or not re.fullmatch(r"[0-9]{0,5}", port):
        raise SourceError(_expected(url))
    view = View(api, f"/api/v1/namespaces/{quote(namespace)}/pods", selector, Pod)
    number = int(port) if port else None
    return KubernetesDiscovery(
        view, lambda: (kube_rows.from_pods(view.items(), number, server_name), []), f"pods {selector} in {namespace}"
    )


def _expected(url: str) -> str:
    return (
        f"{url!r} is no Kubernetes discovery; expected endpoints:///NAMESPACE/SERVICE[:PORT] or "
        "pods:///NAMESPACE?selector=LABELS[&port=PORT], e.g. endpoints:///llm/vllm-kvctl"
    )


def _advice(error: ApiError) -> str:
    if error.status == 401:
        return f"{error}. The credentials are refused: a token that has expired, or of another cluster"
    if error.status == 403:
        return f"{error}. The service account needs list and watch on it: deploy/kustomize/base/operator-rbac.yaml"
    return str(error)
