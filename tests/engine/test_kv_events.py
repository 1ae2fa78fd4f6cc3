"""AllBlocksCleared reaches a real ZMQ subscriber at once, also while no step runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from engine_bridge.engine import guards, pools
from engine_bridge.engine.scheduler import publish_cleared
from tests.engine.scheduler_world import BLOCK, World

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(4 * BLOCK)]


class Subscriber:
    """A router, as far as the wire goes."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def join(self, publisher: Any) -> None:
        """Until something arrives, the subscription may not have reached the publisher."""
        for _ in range(200):
            publisher.publish(KVEventBatch(ts=time.time(), events=[]))
            if self.socket.poll(50):
                return
        raise AssertionError("the publisher never heard of this subscriber")

    def next_events(self, milliseconds: int = 5000) -> list[str]:
        """Names of the events in the next batch that has any; none when no such batch comes in time."""
        until = time.monotonic() + milliseconds / 1000
        while self.socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            batch = self.decoder.decode(self.socket.recv_multipart()[-1])
            if batch.events:
                return [type(event).__name__ for event in batch.events]
        return []

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def subscribed(tmp_path: Path) -> Iterator[tuple[World, Subscriber]]:
    endpoint = f"ipc://{tmp_path}/kv"
    world = World(blocks=64, events=endpoint)
    subscriber = Subscriber(endpoint)
    try:
        subscriber.join(world.scheduler.kv_event_publisher)
        yield world, subscriber
    finally:
        subscriber.close()
        world.scheduler.kv_event_publisher.shutdown()


def test_on_an_idle_engine_the_event_goes_out_without_a_step(subscribed: tuple[World, Subscriber]) -> None:
    world, subscriber = subscribed
    world.add("a", PROMPT, max_tokens=2)
    world.run()
    assert "BlockStored" in subscriber.next_events()
    pools.drop_prefix_cache(world.scheduler)
    assert publish_cleared(world.scheduler) == (True, ["GPU"])
    assert subscriber.next_events() == ["AllBlocksCleared"]


def test_vllm_alone_leaves_it_queued_until_the_next_step(subscribed: tuple[World, Subscriber]) -> None:
    """Why the bridge publishes. If this fails, vLLM has been mended."""
    world, subscriber = subscribed
    world.add("a", PROMPT, max_tokens=2)
    world.run()
    assert subscriber.next_events()
    assert world.scheduler.reset_prefix_cache()
    assert subscriber.next_events(milliseconds=200) == []


def test_under_load_nothing_queued_is_lost_or_overtaken(subscribed: tuple[World, Subscriber]) -> None:
    world, subscriber = subscribed
    world.add("a", PROMPT, max_tokens=20)
    world.schedule()
    pools.drop_prefix_cache(world.scheduler)
    publish_cleared(world.scheduler)
    assert subscriber.next_events() == ["BlockStored", "AllBlocksCleared"]
    world.process()
    world.run()


def test_blocks_of_a_quarantined_request_are_never_announced(subscribed: tuple[World, Subscriber]) -> None:
    world, subscriber = subscribed
    world.add("a", PROMPT, max_tokens=3 * BLOCK)
    world.step()
    assert "BlockStored" in subscriber.next_events()
    guards.install(world.scheduler).quarantine_running()
    pools.drop_prefix_cache(world.scheduler)
    publish_cleared(world.scheduler)
    world.run()
    pools.drop_prefix_cache(world.scheduler)
    publish_cleared(world.scheduler)
    assert subscriber.next_events() == ["AllBlocksCleared"]
    assert subscriber.next_events() == ["AllBlocksCleared"]


def test_without_events_nothing_is_said_to_be_published() -> None:
    world = World(blocks=64)
    pools.drop_prefix_cache(world.scheduler)
    assert publish_cleared(world.scheduler) == (False, [])
