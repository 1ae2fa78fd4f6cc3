"""A Kubernetes API server as far as clients of CacheOperations, pods, slices, leases and events can tell.

kmock's emulator serves kopf well, but has no resource versions to conflict on or to watch from, no uid, no status
subresource and no schema, which is what promises about exactly-once effects rest on. So this is an API server of its
own: optimistic concurrency, uid preconditions, watches from a version with bookmarks and 410 Gone, structural schemas
with CEL, printer columns as tables (what `kubectl get` prints). It holds no disk and no auth, but can demand a token.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from crd_validation import Invalid, admit

Body = dict[str, Any]
CRD = Path(__file__).resolve().parents[2] / "deploy/kustomize/base/cacheoperation-crd.yaml"


@dataclass
class Kind:
    group: str
    version: str
    plural: str
    kind: str
    status: bool = False
    schema: Body | None = None
    columns: list[Body] = field(default_factory=list)
    shorts: list[str] = field(default_factory=list)
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


class Refused(Exception):  # noqa: N818
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def _builtin() -> list[Kind]:
    crd = yaml.safe_load(CRD.read_text())
    version = crd["spec"]["versions"][0]
    return [
        Kind("", "v1", "pods", "Pod", status=True),
        Kind("", "v1", "events", "Event"),
        Kind("", "v1", "namespaces", "Namespace", namespaced=False),
        Kind("", "v1", "services", "Service"),
        Kind("", "v1", "serviceaccounts", "ServiceAccount"),
        Kind("apps", "v1", "deployments", "Deployment"),
        Kind("batch", "v1", "jobs", "Job"),
        Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
        Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
        Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
        Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
        Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
        Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False),
        Kind("coordination.k8s.io", "v1", "leases", "Lease"),
        Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
        Kind(
            "kvctl.dev",
            "v1alpha1",
            "cacheoperations",
            "CacheOperation",
            status=True,
            schema=version["schema"]["openAPIV3Schema"],
            columns=version["additionalPrinterColumns"],
            shorts=crd["spec"]["names"]["shortNames"],
        ),
    ]


_PATH = re.compile(
    r"(?:/api/(?P<core>v1)|/apis/(?P<group>[^/]+)/(?P<version>[^/]+))/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)

_CLUSTER_PATH = re.compile(
    r"(?:/api/(?P<core>v1)|/apis/(?P<group>[^/]+)/(?P<version>[^/]+))/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)


class ApiServer:
    """Objects, their history, and HTTP over both."""

    def __init__(self) -> None:
        self.kinds = {(kind.group, kind.plural): kind for kind in _builtin()}
        self.objects: dict[tuple[str, str, str], Body] = {}
        """(plural, namespace, name) -> object."""
        self.history: list[tuple[int, str, str, Body]] = []
        """(resource version, plural, type, object), in order."""
        self.requests: list[tuple[str, str]] = []
        self.writes: list[tuple[str, str, Body]] = []
        """(method, path, body) of every accepted write, in order: what was on record, and when."""
        self.token = ""
        self.lists = 0
        self.watches = 0
        self.faults: Callable[[str, str], Awaitable[None]] | None = None
        """Called before each request with method and path; may raise Refused, or wait."""
        self.url = ""
        self._versions = itertools.count(1)
        self._forgotten = 0
        self._era = 0
        self._changed = asyncio.Condition()

    # --- what tests do -------------------------------------------------------------------------------------------

    async def put(self, plural: str, body: Body) -> Body:
        """Create, or replace as a controller of the cluster would: no questions asked."""
        meta = body.setdefault("metadata", {})
        meta.setdefault("namespace", "llm")
        key = (plural, meta["namespace"], meta["name"])
        before = self.objects.get(key)
        kind = next(kind for kind in self.kinds.values() if kind.plural == plural)
        stored = {"apiVersion": kind.api_version, "kind": kind.kind, **copy.deepcopy(body)}
        self._born(stored, before)
        await self._store(key, stored, "MODIFIED" if before else "ADDED")
        return stored

    async def remove(self, plural: str, name: str, namespace: str = "llm") -> None:
        stored = self.objects.pop((plural, namespace, name))
        await self._tell(plural, "DELETED", copy.deepcopy(stored))

    async def create(self, plural: str, body: Body) -> Body:
        """As a client: with validation. Refused when it is."""
        kind = next(kind for kind in self.kinds.values() if kind.plural == plural)
        namespace = body.get("metadata", {}).get("namespace", "llm") if kind.namespaced else ""
        return await self._create(kind, namespace, copy.deepcopy(body))

    async def merge(self, plural: str, name: str, patch: Body, namespace: str = "llm") -> Body:
        """As a client: a merge patch of anything but the status."""
        kind = next(kind for kind in self.kinds.values() if kind.plural == plural)
        return await self._update(kind, (plural, namespace, name), lambda old: merged(old, patch), "")

    def get(self, plural: str, name: str, namespace: str = "llm") -> Body:
        return self.objects[plural, namespace, name]

    async def until(self, told: Callable[[], bool], timeout: float = 40.0) -> None:
        """Wait for a state of the objects, woken by every change."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(told)

    def forget(self) -> None:
        """Compact: older versions can no longer be watched from."""
        self._forgotten = next(self._versions)
        self.history.clear()

    async def end_watches(self) -> None:
        """Every open watch ends, as after its timeout or when a server restarts."""
        async with self._changed:
            self._era += 1
            self._changed.notify_all()

    # --- storage -------------------------------------------------------------------------------------------------

    def _born(self, body: Body, before: Body | None) -> None:
        meta = body["metadata"]
        was = before["metadata"] if before else {}
        meta["uid"] = meta.get("uid") or was.get("uid") or str(uuid.uuid4())
        meta["creationTimestamp"] = was.get("creationTimestamp") or datetime.now(UTC).isoformat()
        meta["generation"] = was.get("generation", 0) + (
            1 if not before or before.get("spec") != body.get("spec") else 0
        )

    async def _store(self, key: tuple[str, str, str], body: Body, what: str) -> None:
        self.objects[key] = body
        await self._tell(key[0], what, body)

    async def _tell(self, plural: str, what: str, body: Body) -> None:
        async with self._changed:
            version = next(self._versions)
            body["metadata"]["resourceVersion"] = str(version)
            self.history.append((version, plural, what, copy.deepcopy(body)))
            self._changed.notify_all()

    async def _create(self, kind: Kind, namespace: str, body: Body) -> Body:
        meta = body.setdefault("metadata", {})
        if namespace:
            meta["namespace"] = namespace
        if "generateName" in meta and "name" not in meta:
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        key = (kind.plural, namespace, meta["name"])
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{meta["name"]}" already exists')
        if kind.status:
            body.pop("status", None)
        body.setdefault("apiVersion", kind.api_version)
        body.setdefault("kind", kind.kind)
        meta.pop("uid", None)
        stored = self._validated(kind, body, None)
        self._born(stored, None)
        await self._store(key, stored, "ADDED")
        return stored

    async def _update(self, kind: Kind, key: tuple[str, str, str], change: Callable[[Body], Body], sub: str) -> Body:
        old = self.objects.get(key)
        if old is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{key[2]}" not found')
        new = change(copy.deepcopy(old))
        meta = new["metadata"]
        if meta.get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        # A write to the status of a custom resource keeps the old metadata before anything is compared.
        if sub != "status" and meta.get("uid") not in (None, old["metadata"]["uid"]):
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {meta['uid']}")
        if sub == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
        elif kind.status:
            new["status"] = copy.deepcopy(old.get("status")) if "status" in old else new.pop("status", None)
            if new["status"] is None:
                del new["status"]
        new["metadata"]["uid"] = old["metadata"]["uid"]
        stored = self._validated(kind, new, old)
        self._born(stored, old)
        await self._store(key, stored, "MODIFIED")
        return stored

    def _validated(self, kind: Kind, body: Body, old: Body | None) -> Body:
        if kind.schema is None:
            return body
        try:
            checked = admit(kind.schema, body, old)
        except Invalid as invalid:
            raise Refused(422, "Invalid", f'{kind.kind} "{body["metadata"]["name"]}" is invalid: {invalid}') from None
        return {**checked, "metadata": body["metadata"]}

    # --- HTTP ----------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        try:
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if self.faults is not None:
                await self.faults(request.method, request.path)
            return await self._route(request)
        except Refused as refused:
            return web.json_response(
                {
                    "apiVersion": "v1",
                    "kind": "Status",
                    "status": "Failure",
                    "reason": refused.reason,
                    "message": str(refused),
                    "code": refused.status,
                },
                status=refused.status,
            )

    async def _route(self, request: web.Request) -> web.StreamResponse:
        found = _PATH.fullmatch(request.path) or _CLUSTER_PATH.fullmatch(request.path)
        if found is None:
            return web.json_response(self._discovery(request.path))
        namespace = found.groupdict().get("namespace", "")
        kind = self.kinds.get((found["group"] or "", found["plural"]))
        if kind is None or kind.namespaced != bool(namespace):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        name, sub = found["name"], found["sub"] or ""
        if name is None:
            if request.method == "POST":
                body = await request.json()
                self._remember(request, body)
                return self._answer(request, kind, await self._create(kind, namespace, body), 201)
            if request.query.get("watch") in ("1", "true"):
                try:
                    return await self._watch(request, kind, namespace)
                except ConnectionResetError:
                    return web.Response()  # the client has gone; there is nobody to tell
            return self._list(request, kind, namespace)
        key = (kind.plural, namespace, name)
        if request.method == "GET":
            if key not in self.objects:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            return self._answer(request, kind, self.objects[key])
        body = json.loads(await request.text() or "{}")
        if request.method == "DELETE":
            return await self._delete(request, kind, key, body)
        self._remember(request, body)
        change = (lambda old: merged(old, body)) if request.method == "PATCH" else (lambda _: body)
        return self._answer(request, kind, await self._update(kind, key, change, sub))

    def _remember(self, request: web.Request, body: Body) -> None:
        self.writes.append((request.method, request.path, copy.deepcopy(body)))

    async def _delete(self, request: web.Request, kind: Kind, key: tuple[str, str, str], body: Body) -> web.Response:
        old = self.objects.get(key)
        if old is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{key[2]}" not found')
        wanted = body.get("preconditions", {}).get("uid")
        if wanted not in (None, old["metadata"]["uid"]):
            raise Refused(409, "Conflict", "Precondition failed: UID in precondition")
        if old["metadata"].get("finalizers"):
            old["metadata"]["deletionTimestamp"] = datetime.now(UTC).isoformat()
            await self._store(key, old, "MODIFIED")
        else:
            await self.remove(kind.plural, key[2], key[1])
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _matching(self, request: web.Request, kind: Kind, namespace: str) -> list[Body]:
        found = [body for (plural, ns, _), body in self.objects.items() if plural == kind.plural and ns == namespace]
        return [body for body in found if selected(request, body)]

    def _list(self, request: web.Request, kind: Kind, namespace: str) -> web.Response:
        self.lists += 1
        items = self._matching(request, kind, namespace)
        limit = int(request.query.get("limit", "0")) or len(items)
        start = int(request.query.get("continue", "0") or 0)
        page = items[start : start + limit]
        version = str(max((entry[0] for entry in self.history), default=self._forgotten))
        meta: Body = {"resourceVersion": version}
        if start + limit < len(items):
            meta["continue"] = str(start + limit)
        if "as=Table" in request.headers.get("Accept", ""):
            return web.json_response(table(kind, page, meta))
        return web.json_response(
            {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": meta, "items": page}
        )

    async def _watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        self.watches += 1
        after = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(what: str, body: Body) -> None:
            await response.write(json.dumps({"type": what, "object": body}).encode() + b"\n")

        if after < self._forgotten:
            gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}
            await send("ERROR", gone)
            return response
        era = self._era
        while era == self._era:
            for version, plural, what, body in list(self.history):
                if version <= after:
                    continue
                after = version
                here = body["metadata"].get("namespace", "") == namespace
                if plural == kind.plural and here and selected(request, body):
                    await send(what, body)
            if request.query.get("allowWatchBookmarks") == "true":
                await send("BOOKMARK", {"kind": kind.kind, "metadata": {"resourceVersion": str(after)}})
            async with self._changed:
                await self._changed.wait()
        return response

    def _answer(self, request: web.Request, kind: Kind, body: Body, status: int = 200) -> web.Response:
        if "as=Table" in request.headers.get("Accept", "") and request.method == "GET":
            return web.json_response(table(kind, [body], {}))
        return web.json_response(body, status=status)

    def _discovery(self, path: str) -> Body:
        groups = sorted({kind.group for kind in self.kinds.values() if kind.group})
        versions = {kind.group: kind.version for kind in self.kinds.values()}
        if path == "/version":
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        if path.startswith("/openapi/v3"):
            return self._openapi(path)
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {
                        "name": group,
                        "versions": [{"groupVersion": f"{group}/{versions[group]}", "version": versions[group]}],
                        "preferredVersion": {"groupVersion": f"{group}/{versions[group]}", "version": versions[group]},
                    }
                    for group in groups
                ],
            }
        group = "" if path == "/api/v1" else path.removeprefix("/apis/").split("/")[0]
        kinds = [kind for kind in self.kinds.values() if kind.group == group]
        if not kinds or path.count("/") > 3:
            raise Refused(404, "NotFound", f"nothing at {path}")
        verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
        entries = []
        for kind in kinds:
            entry = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced}
            entries.append({**entry, "kind": kind.kind, "verbs": verbs, "shortNames": kind.shorts})
            if kind.status:
                entries.append({**entry, "name": f"{kind.plural}/status", "kind": kind.kind, "verbs": ["get", "patch"]})
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": kinds[0].api_version,
            "resources": entries,
        }

    def _openapi(self, path: str) -> Body:
        """As much as `kubectl explain` of our own resource reads."""
        kind = self.kinds["kvctl.dev", "cacheoperations"]
        where = f"apis/{kind.api_version}"
        if path == "/openapi/v3":
            return {"paths": {where: {"serverRelativeURL": f"/openapi/v3/{where}"}}}
        if path != f"/openapi/v3/{where}":
            raise Refused(404, "NotFound", f"nothing at {path}")
        about = {"group": kind.group, "version": kind.version, "kind": kind.kind}
        schema = {**(kind.schema or {}), "x-kubernetes-group-version-kind": [about]}
        answers = {"get": {"x-kubernetes-action": "get", "x-kubernetes-group-version-kind": about, "responses": {}}}
        return {
            "openapi": "3.0.0",
            "info": {"title": "kvctl", "version": "0"},
            "paths": {f"/{where}/namespaces/{{namespace}}/{kind.plural}/{{name}}": answers},
            "components": {"schemas": {"dev.kvctl.v1alpha1.CacheOperation": schema}},
        }


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def selected(request: web.Request, body: Body) -> bool:
    labels = body["metadata"].get("labels", {})
    for requirement in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, wanted = requirement.partition("=")
        if str(cell(body, path)) != wanted:
            return False
    return all(
        labels.get(key) == value
        for key, _, value in (part.partition("=") for part in request.query.get("labelSelector", "").split(",") if part)
    )


def cell(body: Any, path: str) -> Any:
    for part in path.strip(".").split("."):
        body = body.get(part) if isinstance(body, dict) else None
    return body


def printed(body: Body, column: Body) -> Any:
    value = cell(body, column["jsonPath"])
    if column["type"] == "date" and value:
        return f"{(datetime.now(UTC) - datetime.fromisoformat(value)).seconds}s"
    return value


def table(kind: Kind, items: list[Body], meta: Body) -> Body:
    """What `kubectl get` asks for: the printer columns of the definition."""

    columns = [{"name": "Name", "type": "string", "format": "name"}]
    columns += [{"name": c["name"], "type": c["type"], "priority": c.get("priority", 0)} for c in kind.columns]
    rows = [
        {
            "cells": [body["metadata"]["name"], *(printed(body, column) for column in kind.columns)],
            "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": body["metadata"]},
        }
        for body in items
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": meta,
        "columnDefinitions": columns,
        "rows": rows,
    }


@asynccontextmanager
async def serving() -> AsyncIterator[ApiServer]:
    """An API server on a port of the kernel's choice."""
    api = ApiServer()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
