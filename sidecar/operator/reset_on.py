"""The annotation `kvctl.dev/reset-on: <weights version>` on a pod: its caches are reset when the value changes.

For operators that know when weights have changed and nothing of this project: they annotate the pod, and this makes a
CacheOperation for it, so that what happens has a record, events and the same promises as any other.

What must not happen is that a value counts as done while KV of other weights is still there. So:

* A value is done when a CacheOperation that was made for it has succeeded, and not before. One that failed is followed
  by another one; what no repetition mends is written on the pod.
* A pod that is not ready is waited for. Nothing tells an engine that has just started from one that has served the
  old weights and lost its readiness for a moment, and a reset of a cold cache costs next to nothing.
* The pod carries the name of the CacheOperation that was made for its present value, numbered. A value that returns
  after another one is a new demand, and what an older CacheOperation did does not answer it.
* That name is written under the very version of the pod that was looked at, and before the CacheOperation is made: a
  value that changes in between is a conflict, and a leader that dies in between is followed by one that goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError, MergePatch
from sidecar.coordinator.discovery.kube_rows import Pod
from sidecar.coordinator.outcomes import NOT_A_SIDECAR
from sidecar.operator.journal import path_of
from sidecar.operator.resource import API_VERSION, KIND, Resource, read

LOG: Final = logging.getLogger(__name__)

RESET_ON: Final = "kvctl.dev/reset-on"
RESET_OPERATION: Final = "kvctl.dev/reset-operation"
"""Name of the CacheOperation that was made for the present value."""
RESET_DONE: Final = "kvctl.dev/reset-done"
"""The value for which the caches were reset with success."""
RESET_FAILED: Final = "kvctl.dev/reset-failed"
"""Why the present value's reset cannot succeed on this pod, ever."""

KEEP_S: Final = 3600
TIMEOUT_S: Final = 120
RETRY_S: Final = (5.0, 15.0, 60.0, 300.0, 900.0)
"""Pauses before the next CacheOperation after one that failed; the last one is repeated."""
LOOK_S: Final = 60.0
"""How often a CacheOperation that is under way is looked at, beside what the watch tells."""
UNDISCOVERED_TRIES: Final = 3
"""CacheOperations for a pod that is no replica before it is given up: discovery may be a moment behind a new pod."""

_HOPELESS: Final = frozenset({"UNIMPLEMENTED", "INVALID_ARGUMENT"})
"""Codes of engines that will say the same next time, after having dropped the caches that they can drop."""
_MAX_WHY: Final = 512
_NUMBER: Final = re.compile(r"-(\d{1,9})-[0-9a-f]{10}$")


def wanted(pod: Pod) -> str:
    """The value to act on; empty when there is none, or it is done.

    As it is, spaces and all: who set it waits for the very same one to be done.
    """
    annotations = pod.metadata.annotations or {}
    value = annotations.get(RESET_ON, "")
    if not value.strip() or annotations.get(RESET_DONE) == value or pod.metadata.deletion_timestamp is not None:
        return ""
    return value


def operation_name(pod: Pod, value: str, number: int) -> str:
    """Name of the `number`th CacheOperation of a pod, made for `value`."""
    digest = hashlib.sha256(f"{pod.metadata.uid}\0{value}\0{number}".encode()).hexdigest()[:10]
    return f"reset-on-{pod.metadata.name[:40].rstrip('-.')}-{number}-{digest}"


def operation_for(pod: Pod, value: str, name: str) -> dict[str, object]:
    """The CacheOperation: a keep reset with quarantine, which needs no idle moment and lets no stale KV back.

    Every tier whose content depends on the weights. The multimodal cache holds inputs as they were before any weights
    saw them, and engines cannot clear it from within.
    """
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
            "reset": {
                "runningRequests": "Keep",
                "quarantineRunning": True,
                "resetConnector": True,
                "resetEncoderCache": True,
                "purpose": "WeightUpdate",
            },
            "targets": {"names": [pod.metadata.name]},
            "concurrencyPolicy": "Allow",
            "retryRefused": True,
            "timeoutSeconds": TIMEOUT_S,
            "ttlSecondsAfterFinished": KEEP_S,
        },
    }


def hopeless(operation: Resource) -> str:
    """Why another try would end the same way; empty when it might not."""
    for row in operation.status.results or ():
        if row.code in _HOPELESS:
            return f"{row.code} {row.reason}: {row.message}"[:_MAX_WHY]
    return ""


def no_sidecar(operation: Resource) -> str:
    """Why its pod seems to be no replica, and what to do; empty when it is one."""
    why = ""
    if operation.status.phase == "Failed" and not operation.status.operation_id:
        why = f"the operator knows no replica of that name ({operation.status.message})"
    for row in operation.status.results or ():
        if row.reason == NOT_A_SIDECAR:
            why = row.message
    if not why:
        return ""
    return (
        "no sidecar to reset it with: give the pod one (deploy/kustomize/components/sidecar, which also sets the label "
        f"that the operator looks for), then set a new value of {RESET_ON}; {why}"
    )[:_MAX_WHY]


@dataclass(slots=True)
class _Tries:
    """What has come of a pod's present value so far."""

    failures: int = 0
    without_sidecar: int = 0
    """CacheOperations that found no sidecar, one after another."""
    failed: str = ""
    """The CacheOperation that failed last."""
    due: float = 0.0
    """When the next one is, on the loop's clock."""


Announce = Callable[[Pod, str, str, str], Awaitable[None]]
"""Post an event on a pod: pod, "Normal" or "Warning", reason, message."""


class ResetOn:
    """Acts on pods and CacheOperations that the watch tells of, while it leads. Belongs to one loop."""

    def __init__(self, api: Api, announce: Announce, retry_s: Sequence[float] = RETRY_S) -> None:
        self._api = api
        self._announce = announce
        self._retry_s = tuple(retry_s)
        self._leading = False
        self._pods: dict[str, Pod] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._later: dict[str, asyncio.Task[None]] = {}
        self._tries: dict[str, _Tries] = {}

    # --- what is told --------------------------------------------------------------------------------------------

    async def seen(self, pod: Pod) -> None:
        """A pod is there, in this state."""
        uid = pod.metadata.uid
        if RESET_ON not in (pod.metadata.annotations or {}):
            self.gone(uid)
            return
        self._pods[uid] = pod
        await self._act(uid)

    def gone(self, uid: str) -> None:
        """A pod was deleted, or nothing is asked of it any more."""
        self._pods.pop(uid, None)
        self._turns.pop(uid, None)
        self._tries.pop(uid, None)
        self._not_later(uid)

    async def operation_seen(self, operation: Resource) -> None:
        """A CacheOperation is in this state, or is gone."""
        name = operation.metadata.name
        for uid, pod in list(self._pods.items()):
            if (pod.metadata.annotations or {}).get(RESET_OPERATION) == name:
                await self._act(uid)

    def lead(self) -> None:
        """Act from now on, first on what others have left; not waited for, because the lease is to be renewed."""
        self._leading = True
        for uid in self._pods:
            self._not_later(uid)
            self._later[uid] = asyncio.create_task(self._act_later(uid, 0))

    def stop(self) -> None:
        """Another process leads, or none: what is written on the pods is enough for it."""
        self._leading = False
        for uid in list(self._later):
            self._not_later(uid)
        self._tries.clear()

    # --- one pod -------------------------------------------------------------------------------------------------

    async def _act(self, uid: str) -> None:
        async with self._turns.setdefault(uid, asyncio.Lock()):
            pod = self._pods.get(uid)
            if pod is None or not self._leading:
                return
            self._not_later(uid)
            try:
                again_s = await self._step(pod)
            except (ApiError, DiscoveryError) as error:
                if isinstance(error, ApiError) and error.status in (404, 409):
                    return  # the pod has changed or is gone: what the watch tells next brings it here again
                LOG.warning("pod %s/%s: %s: %s", pod.metadata.namespace, pod.metadata.name, RESET_ON, error)
                again_s = self._pause(uid)
            if again_s is not None:
                self._later[uid] = asyncio.create_task(self._act_later(uid, again_s))

    async def _step(self, pod: Pod) -> float | None:
        """Bring one pod on; seconds until it should be looked at again, None when an event will say so."""
        value, annotations = wanted(pod), pod.metadata.annotations or {}
        if not value or not pod.ready:
            return None
        name = annotations.get(RESET_OPERATION, "")
        if name != operation_name(pod, value, _number(name)):
            self._tries.pop(pod.metadata.uid, None)
            return await self._demand(pod, value)
        if RESET_FAILED in annotations:
            return None
        operation = await self._read(pod, name)
        if operation is None:
            await self._make(pod, value, name)
            return LOOK_S
        if not operation.finished:
            return LOOK_S
        if operation.status.phase == "Succeeded":
            await self._annotate(pod, {RESET_DONE: value})
            self._tries.pop(pod.metadata.uid, None)
            return None
        return await self._failed(pod, value, operation)

    async def _failed(self, pod: Pod, value: str, operation: Resource) -> float | None:
        """Another CacheOperation after a while, unless that would end the same way."""
        uid, now = pod.metadata.uid, asyncio.get_running_loop().time()
        tries = self._tries.setdefault(uid, _Tries())
        if tries.failed != operation.metadata.name:
            lacking = no_sidecar(operation)
            tries.without_sidecar = tries.without_sidecar + 1 if lacking else 0
            why = hopeless(operation) or (lacking if tries.without_sidecar >= UNDISCOVERED_TRIES else "")
            if why:
                await self._annotate(pod, {RESET_FAILED: why})
                await self._announce(pod, "Warning", "ResetOnFailed", f"{RESET_ON}={value} is given up: {why}")
                return None
            tries.failed, tries.due = operation.metadata.name, now + self._pause(uid)
        if now < tries.due:
            return tries.due - now
        return await self._demand(pod, value)

    async def _demand(self, pod: Pod, value: str) -> float:
        """The next CacheOperation: its name on the pod, then itself."""
        number = _number((pod.metadata.annotations or {}).get(RESET_OPERATION, "")) + 1
        name = operation_name(pod, value, number)
        await self._annotate(pod, {RESET_OPERATION: name, RESET_DONE: None, RESET_FAILED: None})
        await self._make(pod, value, name)
        return LOOK_S

    async def _make(self, pod: Pod, value: str, name: str) -> None:
        body = msgspec.json.encode(operation_for(pod, value, name))
        try:
            await self._api.request("POST", path_of(pod.metadata.namespace), body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    async def _read(self, pod: Pod, name: str) -> Resource | None:
        try:
            answer = await self._api.request("GET", path_of(pod.metadata.namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return read(msgspec.json.decode(answer))

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Under the version that was looked at: ApiError 409 when the pod has changed since."""
        meta = pod.metadata
        about = {"uid": meta.uid, "resourceVersion": meta.resource_version, "annotations": annotations}
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"
        body = msgspec.json.encode({"metadata": about})
        answer = await self._api.request("PATCH", path, body=body, content_type=MergePatch)
        if meta.uid in self._pods:
            self._pods[meta.uid] = msgspec.json.decode(answer, type=Pod)

    # --- time ----------------------------------------------------------------------------------------------------

    def _pause(self, uid: str) -> float:
        tries = self._tries.setdefault(uid, _Tries())
        tries.failures += 1
        return self._retry_s[min(tries.failures, len(self._retry_s)) - 1]

    async def _act_later(self, uid: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._later.pop(uid, None)  # so that acting does not cancel the task that it runs in
        await self._act(uid)

    def _not_later(self, uid: str) -> None:
        later = self._later.pop(uid, None)
        if later is not None:
            later.cancel()


def _number(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[1]) if found else 0
