"""The waits behind `kvctl hook`, each with an end."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from kvctl.v1 import replica_pb2, types_pb2

from sidecar.coordinator import calls, outcomes
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.targets import Target
from sidecar.rpc import addresses
from sidecar.rpc.channels import ClientSecurity

LOOK_EVERY_S: Final = 0.5
QUIET_S: Final = 2.0
"""How long nothing must run or wait: requests still arrive until every router knows that the pod is terminating."""
CALL_TIMEOUT_S: Final = 3.0
LOST_TRIES: Final = 3
"""Looks without an answer after which the sidecar counts as gone: it may stop before the engine does."""

_NOBODY_TO_WAIT_FOR: Final = frozenset(
    {
        types_pb2.VERDICT_ENGINE_DEAD,
        types_pb2.VERDICT_ENGINE_HUNG,
        types_pb2.VERDICT_ENGINE_STOPPED,
        types_pb2.VERDICT_STARTING,
    }
)


async def until_idle(address: str, security: ClientSecurity, timeout_s: float) -> str:
    """Wait until no engine has had a running or waiting request for a while. Says how the wait ended."""
    channels = Channels(security)
    target = Target(addresses.parse(address, what="sidecar address").target)
    left = "nothing was seen"
    lost = 0
    idle_since = math.inf
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                async with channels.lease(target) as channel:
                    found = await calls.get_admission(channel, CALL_TIMEOUT_S, channels.metadata())
                if isinstance(found, Failure):
                    lost += 1
                    left = outcomes.unreachable(found, address, CALL_TIMEOUT_S).message
                    if lost >= LOST_TRIES or found.code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"):
                        return f"not waiting: {left}"
                else:
                    lost = 0
                    busy = requests(found)
                    idle_since = math.inf if busy else min(idle_since, time.monotonic())
                    if time.monotonic() - idle_since >= QUIET_S:
                        return "no request runs or waits"
                    left = f"{busy} requests still run or wait" if busy else "idle, but not for long yet"
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        return f"gave up after {timeout_s:g} s: {left}"
    finally:
        await channels.close()


async def until_answering(address: str, security: ClientSecurity, timeout_s: float) -> str:
    """Wait until the sidecar says who it is. Says how the wait ended."""
    channels = Channels(security)
    target = Target(addresses.parse(address, what="sidecar address").target)
    left = "nothing was tried"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                async with channels.lease(target) as channel:
                    found = await calls.get_replica(channel, address, CALL_TIMEOUT_S, channels.metadata())
                if not isinstance(found, Failure):
                    return f"the sidecar {found.name or address} answers"
                left = found.message
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        return f"gave up after {timeout_s:g} s: {left}"
    finally:
        await channels.close()


def requests(found: replica_pb2.AdmissionStatusResponse) -> int:
    """Requests that a stopping pod should wait for; engines that cannot finish any are left out."""
    alive = [engine for engine in found.engines if engine.verdict not in _NOBODY_TO_WAIT_FOR]
    return sum(max(engine.requests.running, 0) + max(engine.requests.waiting, 0) for engine in alive)
