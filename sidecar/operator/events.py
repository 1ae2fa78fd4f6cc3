"""Events on a CacheOperation: what `kubectl describe` shows below it. Best effort, like all events."""

from __future__ import annotations

import logging
import uuid
from datetime import UTC, datetime
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError
from sidecar.operator.resource import API_VERSION, KIND, Resource

LOG: Final = logging.getLogger(__name__)

COMPONENT: Final = "kvctl-operator"
_MAX_MESSAGE: Final = 1000
"""The API server takes 1,024 bytes; what is cut is in the status."""


class Announcer:
    """Posts events."""

    def __init__(self, api: Api, instance: str) -> None:
        """`instance`: this process, for who reads events of several operators."""
        self._api = api
        self._instance = instance

    async def __call__(self, resource: Resource, kind: str, reason: str, message: str) -> None:
        """`kind`: "Normal" or "Warning"; `reason`: CamelCase."""
        meta = resource.metadata
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta.name[:200]}.{uuid.uuid4().hex[:16]}", "namespace": meta.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
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
            LOG.warning("%s: event %s not posted: %s", resource.key, reason, error)
