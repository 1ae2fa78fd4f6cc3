"""Print as JSON what the bridge finds on the vLLM that is first on the path, per capability: "" or why it is off.

Asked of a bridge that is attached to vLLM's engine core, so that a version is said to lack what it lacks and no more.
"""

from __future__ import annotations

import json
import sys

import vllm
from vllm.config import KVEventsConfig

from tests.engine.stepped_engine import Loop


def capabilities() -> dict[str, str]:
    """Of an engine without a connector, with KV events on."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="inproc://kvctl-compat", topic="kv")
    loop = Loop(asynchronous=False, connector=False, blocks=128, kv_events_config=events)
    try:
        return loop.bridge._port.capabilities()  # type: ignore[no-any-return]
    finally:
        loop.close()


if __name__ == "__main__":
    json.dump({"version": vllm.__version__, "path": vllm.__file__, "capabilities": capabilities()}, sys.stdout)
