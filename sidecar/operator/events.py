"""Events on a CacheOperation or a pod: what `kubectl describe` shows below it. Best effort, like all events."""

from __future__ import annotations

import logging
import uuid
from datetime import UTC, datetime
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError
from sidecar.coordinator.discovery.kube_rows import Meta, Pod
from sidecar.operator.resource import API_VERSION, KIND, Resource

LOG: Final = logging.getLogger(__name__)

COMPONENT: Final = "kvctl-operator"
_NAME_KEPT: Final = 200
"""Characters of the name of what an event is about; a whole name has at most 253."""
_MAX_MESSAGE: Final = 1000
"""The API server takes 1,024 bytes; what is cut is in the status."""


class Announcer:
    """Posts events."""

    def __init__(self, api: Api, instance: str) -> None:
        """`instance`: this process, for who reads events of several operators."""
        self._api = api
        self._instance = instance

    async def __call__(self, resource: Resource, kind: str, reason: str, message: str) -> None:
        """On a CacheOperation. `kind`: "Normal" or "Warning"; `reason`: CamelCase."""
        await self._post(resource.metadata, API_VERSION, KIND, kind, reason, message)

    async def on_pod(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """On a pod; as above."""
        await self._post(pod.metadata, "v1", "Pod", kind, reason, message)

    async def _post(self, meta: Meta, version: str, about: str, kind: str, reason: str, message: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": event_name(meta.name, uuid.uuid4().hex[:16]), "namespace": meta.namespace},
            "involvedObject": {
                "apiVersion": version,
                "kind": about,
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message.encode()[:_MAX_MESSAGE].decode("utf-8", "ignore"),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            path = f"/api/v1/namespaces/{meta.namespace}/events"
            await self._api.request("POST", path, body=msgspec.json.encode(event))
        except (ApiError, DiscoveryError) as error:
            LOG.warning("%s/%s: event %s not posted: %s", meta.namespace, meta.name, reason, error)


def event_name(name: str, suffix: str) -> str:
    """Name of an event about an object: the object's, cut so that the whole is a name still (RFC 1123 subdomain)."""
    return f"{name[:_NAME_KEPT].rstrip('-.')}.{suffix}"
