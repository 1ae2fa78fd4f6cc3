"""The annotation `kvctl.dev/reset-on: <weights version>` on a pod: its cache is reset when the value changes.

For operators that know when weights have changed and nothing of this project: they annotate the pod, and this makes a
CacheOperation for it, so that what happens has a record, events and the same promises as any other. Its name is
derived from the pod's uid and the value, so that it is made once, whoever makes it; a second annotation remembers the
value that was acted on after the CacheOperation itself is long gone.

A pod that is not ready yet has a cold cache: its value is taken as the one it started with.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError, MergePatch
from sidecar.coordinator.discovery.kube_rows import Pod
from sidecar.operator.journal import path_of
from sidecar.operator.resource import API_VERSION, KIND

LOG: Final = logging.getLogger(__name__)

RESET_ON: Final = "kvctl.dev/reset-on"
RESET_DONE: Final = "kvctl.dev/reset-done"
"""The value that was last acted on: a CacheOperation was made for it, or the pod started with it."""

KEEP_S: Final = 3600
TIMEOUT_S: Final = 120


def wanted(pod: Pod) -> str:
    """The value to act on; empty when there is none, or it was acted on already."""
    annotations = pod.metadata.annotations or {}
    value = annotations.get(RESET_ON, "").strip()
    if not value or annotations.get(RESET_DONE) == value or pod.metadata.deletion_timestamp is not None:
        return ""
    return value


def operation_for(pod: Pod, value: str) -> dict[str, object]:
    """The CacheOperation: a keep reset with quarantine, which needs no idle moment and lets no stale KV back."""
    digest = hashlib.sha256(f"{pod.metadata.uid}\0{value}".encode()).hexdigest()[:10]
    name = f"reset-on-{pod.metadata.name[:40].rstrip('-.')}-{digest}"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": pod.metadata.namespace,
            "annotations": {RESET_ON: value},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid}
            ],
        },
        "spec": {
            "reset": {"runningRequests": "Keep", "quarantineRunning": True, "purpose": "WeightUpdate"},
            "targets": {"names": [pod.metadata.name]},
            "concurrencyPolicy": "Allow",
            "retryRefused": True,
            "timeoutSeconds": TIMEOUT_S,
            "ttlSecondsAfterFinished": KEEP_S,
        },
    }


class ResetOn:
    """Acts on pods that the watch tells of."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def seen(self, pod: Pod) -> None:
        """Make the CacheOperation if one is due. Trouble is logged; the pod's next event brings it here again."""
        value = wanted(pod)
        if not value:
            return
        try:
            if pod.ready:
                await self._make(pod, value)
            await self._remember(pod, value)
        except (ApiError, DiscoveryError) as error:
            LOG.warning("pod %s/%s: %s=%s: %s", pod.metadata.namespace, pod.metadata.name, RESET_ON, value, error)

    async def _make(self, pod: Pod, value: str) -> None:
        body = msgspec.json.encode(operation_for(pod, value))
        try:
            await self._api.request("POST", path_of(pod.metadata.namespace), body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists" and error.status != 409:
                raise

    async def _remember(self, pod: Pod, value: str) -> None:
        body = msgspec.json.encode({"metadata": {"uid": pod.metadata.uid, "annotations": {RESET_DONE: value}}})
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}"
        await self._api.request("PATCH", path, body=body, content_type=MergePatch)
