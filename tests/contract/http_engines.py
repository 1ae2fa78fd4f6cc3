"""Engines of a stock vLLM over HTTP, as the tests of the HTTP backend ask them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine_bridge import protocol
from sidecar.backends.engine import Answered
from sidecar.backends.http.engines import HttpEngine, HttpEngines
from tests.contract.fake_vllm_http import FakeVllm


def reset(running: str = "fail", request_id: str = "", **asked: bool) -> protocol.Reset:
    return protocol.Reset(1, request_id or str(uuid.uuid4()), 0, running, **asked)  # type: ignore[arg-type]


def soon(seconds: float = 5.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@asynccontextmanager
async def engines(vllm: FakeVllm, **options: Any) -> AsyncIterator[HttpEngines]:
    found = HttpEngines(vllm.url, poll_s=3600, **options)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


def first(found: HttpEngines) -> HttpEngine:
    engine = found.engines()[0]
    assert isinstance(engine, HttpEngine)
    return engine


async def outcome(vllm: FakeVllm, mutation: protocol.Mutation) -> protocol.Outcome:
    async with vllm, engines(vllm) as found:
        answer = await first(found).submit(mutation, soon())
        assert isinstance(answer, Answered), answer
        return answer.outcome


def tiers(result: protocol.Outcome) -> dict[str, str]:
    assert isinstance(result.result, protocol.ResetResult)
    names = ("prefix", "connector", "multimodal", "encoder")
    return {name: getattr(result.result, name).state for name in names}
