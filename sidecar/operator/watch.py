"""The watch over CacheOperations and annotated pods: kopf, in a thread and an event loop of its own.

kopf is used for what it is best at, watching resources through every kind of interruption, with event handlers only:
those add no finalizer and no annotation, so that a CacheOperation can be deleted at any time, also while no operator
runs. It takes its loop for its own (when it stops it cancels every task that it finds there), hence the thread; what
it sees is handed over to the operator's loop, and it goes on when that has been dealt with.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final

import kopf
import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_access import Access
from sidecar.coordinator.discovery.kube_rows import Pod
from sidecar.operator.login import Login
from sidecar.operator.resource import GROUP, PLURAL, VERSION, Resource, read

LOG: Final = logging.getLogger(__name__)

WATCH_SECONDS: Final = 290
_STOP_S: Final = 5.0
_WATCHED: Final = 2
"""Watches that there are: CacheOperations and pods."""
_LOOK_S: Final = 1.0

Body = Mapping[str, object]
OnOperation = Callable[[Resource, bool], Awaitable[None]]
"""A CacheOperation as it is, or as it was when it was deleted (True)."""
OnPod = Callable[[Pod, bool], Awaitable[None]]


class _Backoffs:
    """Seconds between kopf's tries of a request, without end: after the last one it gives the watch up, for good."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0, 8.0), itertools.repeat(10.0))


class Watch:
    """Runs until cancelled, or raises when kopf ends by itself."""

    def __init__(self, access: Access, namespace: str, on_operation: OnOperation, on_pod: OnPod) -> None:
        self._access = access
        self._namespace = namespace
        self._on_operation = on_operation
        self._on_pod = on_pod
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """`ready` is called when the watch has begun."""
        self._loop = loop = asyncio.get_running_loop()
        ended = loop.create_future()
        thread = threading.Thread(target=self._thread, args=(loop, ready, ended), name="kopf", daemon=True)
        thread.start()
        try:
            await ended
        except Exception as error:
            raise DiscoveryError(f"the watch over CacheOperations and pods has ended: {error}") from error
        finally:
            self._stopping.set()
            # In a thread: joining here would block the loop that kopf's last handlers wait for.
            await asyncio.shield(asyncio.to_thread(thread.join, _STOP_S))
        raise DiscoveryError("the watch over CacheOperations has ended: is their definition installed?")

    def _thread(self, loop: asyncio.AbstractEventLoop, ready: Callable[[], None], ended: asyncio.Future[None]) -> None:
        began = threading.Event()

        def tell_ready() -> None:
            began.wait()
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(ready)

        threading.Thread(target=tell_ready, name="kopf ready", daemon=True).start()
        error: BaseException | None = None
        try:
            asyncio.run(self._kopf(began))
        except Exception as raised:
            LOG.exception("the watch raised")
            error = raised
        finally:
            began.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, ended, error)

    async def _kopf(self, began: threading.Event) -> None:
        registry = kopf.OperatorRegistry()
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False  # events are posted by `events`
        settings.scanning.disabled = True  # the CRD and the namespace are there before the operator is
        settings.watching.server_timeout = WATCH_SECONDS
        settings.process.ultimate_exiting_timeout = None
        settings.networking.error_backoffs = _Backoffs()
        login = Login(self._access)

        async def credentials(**_: object) -> kopf.ConnectionInfo:
            return await login.again()

        kopf.on.login(registry=registry)(credentials)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self._operation_event)
        # All pods: a filter on the annotation would not tell that it was taken away.
        kopf.on.event("", "v1", "pods", registry=registry)(self._pod_event)
        looking = asyncio.create_task(self._end_without_a_definition())
        try:
            await kopf.operator(
                registry=registry,
                settings=settings,
                standalone=True,
                namespaces=[self._namespace],
                stop_flag=self._stopping,
                ready_flag=began,
            )
        finally:
            # A thread of kopf's waits for it, and the loop for that thread: an error would never get out of here.
            self._stopping.set()
            looking.cancel()

    async def _end_without_a_definition(self) -> None:
        """What is not installed when kopf begins is not watched later either, and kopf would go on all the same."""
        missing = 0
        while not self._stopping.is_set():
            await asyncio.sleep(_LOOK_S)
            there = sum(task.get_name().startswith("watcher for ") for task in asyncio.all_tasks())
            missing = missing + 1 if 0 < there < _WATCHED else 0
            if missing > 1:
                self._stopping.set()

    async def _operation_event(self, event: Body, **_: object) -> None:
        body, deleted = _unpacked(event)
        try:
            resource = read(body)
        except ValueError as error:
            LOG.error("%s", error)
            return
        await self._hand_over(self._on_operation(resource, deleted))

    async def _pod_event(self, event: Body, **_: object) -> None:
        body, deleted = _unpacked(event)
        await self._hand_over(self._on_pod(msgspec.convert(dict(body), type=Pod), deleted))

    async def _hand_over(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        assert self._loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))


def _unpacked(event: Body) -> tuple[Body, bool]:
    body = event["object"]
    assert isinstance(body, Mapping)
    return body, event.get("type") == "DELETED"


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
