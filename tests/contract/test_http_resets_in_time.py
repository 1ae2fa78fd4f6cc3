"""A reset of stock vLLM over HTTP ends in time or is unknown, and is sent once, however often it is asked for."""

from __future__ import annotations

import asyncio
import time

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Lost, Unreachable
from tests.contract.fake_vllm_http import Answer, FakeVllm
from tests.contract.http_engines import engines, first, reset, soon


async def test_a_reset_without_an_answer_in_time_is_unknown_and_its_end_can_be_looked_up():
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        began = time.monotonic()
        answer = await engine.submit(asked, soon(0.2))
        assert time.monotonic() - began < 10
        assert isinstance(answer, Lost)
        assert answer.execution == "unknown"
        looked = await engine.lookup(asked.request_id, soon())
        assert isinstance(looked, protocol.Found)
        assert (looked.known, looked.outcome) == (True, None)
        gate.set()
        answer = await engine.submit(asked, soon())
        assert isinstance(answer, Answered)
        assert answer.outcome.state == "done"
        looked = await engine.lookup(asked.request_id, soon())
        assert looked.outcome is not None
    assert len(vllm.resets) == 1, "a repeat joins and never posts again"


async def test_a_repeat_returns_the_record_and_other_arguments_are_refused():
    vllm = FakeVllm().dev()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        await engine.submit(asked, soon())
        again = await engine.submit(asked, soon())
        other = await engine.submit(reset("preempt", asked.request_id), soon())
    assert isinstance(again, Answered)
    assert again.outcome.replayed
    assert isinstance(other, Answered)
    assert other.outcome.state == "mismatch"
    assert len(vllm.resets) == 1


async def test_a_second_reset_meanwhile_is_busy_with_the_first_ones_id():
    """sglang#21490."""
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    one = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        running = asyncio.create_task(engine.submit(one, soon()))
        await vllm.posted.wait()
        answer = await engine.submit(reset(), soon())
        gate.set()
        await running
    assert isinstance(answer, Answered)
    assert (answer.outcome.state, answer.outcome.other_request_id) == ("busy", one.request_id)


async def test_a_connection_that_breaks_after_sending_is_unknown():
    vllm = FakeVllm().dev(Answer(drop=True))
    async with vllm, engines(vllm) as found:
        answer = await first(found).submit(reset(), soon())
    assert isinstance(answer, Lost)
    assert answer.execution == "unknown"


async def test_a_refused_connection_sent_nothing_and_may_be_tried_again_under_the_same_id():
    vllm = FakeVllm().dev()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        await vllm.stop()
        answer = await engine.submit(asked, soon())
        assert isinstance(answer, Unreachable)
        assert not answer.sent
        async with vllm:
            answer = await engine.submit(asked, soon())
    assert isinstance(answer, Answered)
    assert answer.outcome.state == "done"


async def test_nothing_that_was_sent_can_be_cancelled():
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        running = asyncio.create_task(engine.submit(asked, soon()))
        await vllm.posted.wait()
        cancelled = await engine.cancel(asked.request_id, soon())
        gate.set()
        await running
    assert isinstance(cancelled, protocol.Cancelled)
    assert not cancelled.cancelled
