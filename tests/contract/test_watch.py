"""Streams of admission: changes at once, samples at the interval, no reader grows a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvctl.v1 import replica_pb2 as replica
from kvctl.v1 import types_pb2 as types

from engine_bridge.page import Phase
from sidecar.backends.engine import Liveness
from sidecar.replica.sampler import Sampler
from sidecar.replica.watch import SlowReaderError, WatchEndedError, Watchers
from tests.contract.engines_in_memory import MemoryEngines


class Replica:
    """A sampler that a test ticks by hand."""

    def __init__(self) -> None:
        self.engines = MemoryEngines()
        self.engines.write()
        self.sampler = Sampler(self.engines, self.engines.clock)
        self.sampler.tick()

    def flip(self) -> None:
        """One change of verdict."""
        engine = self.engines.listed[0]
        engine.alive = Liveness.ALIVE if engine.alive is Liveness.STOPPED else Liveness.STOPPED
        self.engines.forward(0.5)
        self.engines.write(phase=Phase.IDLE)
        self.sampler.tick()


@asynccontextmanager
async def reading(
    watchers: Watchers, interval_s: float = 0.0
) -> AsyncIterator[AsyncIterator[replica.WatchAdmissionResponse]]:
    subscription = watchers.subscribe(interval_s)
    try:
        async with asyncio.timeout(30):
            yield subscription
    finally:
        watchers.unsubscribe(subscription)


def verdict(message: replica.WatchAdmissionResponse) -> int:
    return message.admission.engines[0].verdict


async def test_the_first_message_is_the_present_state_at_once():
    async with reading(Watchers(Replica().sampler)) as stream:
        message = await anext(stream)
    assert (verdict(message), message.changed) == (types.VERDICT_IDLE, False)


async def test_a_change_is_sent_at_once_and_marked():
    here = Replica()
    async with reading(Watchers(here.sampler)) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        here.flip()
        message = await waiting
    assert (verdict(message), message.changed) == (types.VERDICT_ENGINE_STOPPED, True)
    assert message.admission.stalled


async def test_every_change_arrives_in_order_even_when_the_reader_was_away():
    here = Replica()
    async with reading(Watchers(here.sampler)) as stream:
        await anext(stream)
        for _ in range(4):
            here.flip()
        got = [verdict(await anext(stream)) for _ in range(4)]
    assert got == [types.VERDICT_ENGINE_STOPPED, types.VERDICT_IDLE] * 2


async def test_without_an_interval_nothing_is_sent_but_changes():
    here = Replica()
    async with reading(Watchers(here.sampler)) as stream:
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(stream)


async def test_samples_come_at_the_interval():
    loop = asyncio.get_running_loop()
    async with reading(Watchers(Replica().sampler), 0.1) as stream:
        began = loop.time()
        messages = [await anext(stream) for _ in range(4)]
        took = loop.time() - began
    assert not any(message.changed for message in messages)
    assert took >= 0.29


async def test_an_interval_shorter_than_the_smallest_becomes_the_smallest():
    loop = asyncio.get_running_loop()
    async with reading(Watchers(Replica().sampler), 0.001) as stream:
        began = loop.time()
        for _ in range(3):
            await anext(stream)
        assert loop.time() - began >= 0.19


async def test_a_reader_that_lets_its_queue_overflow_is_dropped_and_what_it_held_is_freed():
    here = Replica()
    watchers = Watchers(here.sampler, queue=5)
    async with reading(watchers) as stream:
        await anext(stream)
        for _ in range(50):
            here.flip()
        assert len(stream._changes) == 0
        with pytest.raises(SlowReaderError, match="5 changes unread"):
            await anext(stream)


async def test_one_slow_reader_costs_the_others_nothing():
    here = Replica()
    watchers = Watchers(here.sampler, queue=3)
    async with reading(watchers) as slow, reading(watchers) as quick:
        await anext(slow)
        await anext(quick)
        for _ in range(10):
            here.flip()
            assert (await anext(quick)).changed
        with pytest.raises(SlowReaderError):
            await anext(slow)


async def test_a_reader_that_takes_nothing_while_samples_are_due_is_dropped():
    watchers = Watchers(Replica().sampler, patience_s=0.2)
    async with reading(watchers, 0.1) as stream:
        await anext(stream)
        async with asyncio.timeout(30):
            await stream.over.wait()
        with pytest.raises(SlowReaderError, match="took nothing"):
            await anext(stream)


async def test_a_quiet_stream_without_an_interval_is_never_dropped():
    """llm-d-kv-cache#359: a long idle watch survives."""
    watchers = Watchers(Replica().sampler, patience_s=0.05)
    async with reading(watchers) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        waiting.cancel()


async def test_a_write_that_a_stuck_reader_blocks_is_given_up():
    here = Replica()
    watchers = Watchers(here.sampler, queue=3)
    stuck = asyncio.Event()

    async def write(_: replica.WatchAdmissionResponse) -> None:
        stuck.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        pumping = asyncio.create_task(watchers.pump(0.0, write))
        await stuck.wait()
        for _ in range(10):
            here.flip()
        with pytest.raises(SlowReaderError):
            await pumping
    assert len(watchers) == 0


async def test_a_reader_that_goes_away_leaves_nothing_behind():
    here = Replica()
    watchers = Watchers(here.sampler)
    got: list[replica.WatchAdmissionResponse] = []

    async def write(message: replica.WatchAdmissionResponse) -> None:
        got.append(message)

    pumping = asyncio.create_task(watchers.pump(0.0, write))
    while not got:  # noqa: ASYNC110 - bounded by the test's timeout
        await asyncio.sleep(0)
    pumping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pumping
    assert len(watchers) == 0
    assert here.sampler._listeners == []


async def test_a_stopping_server_ends_every_stream_and_starts_none():
    here = Replica()
    watchers = Watchers(here.sampler)
    async with reading(watchers) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        watchers.end()
        with pytest.raises(WatchEndedError):
            await waiting
    with pytest.raises(WatchEndedError):
        watchers.subscribe(0)
