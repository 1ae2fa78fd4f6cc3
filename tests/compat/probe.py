"""Print as JSON what the bridge finds on the vLLM that is first on the path, per capability: "" or why it is off.

Also tried: whether each feature that is found by probing is there, so that the table shows what a version lacks.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import vllm

from engine_bridge.engine import guards, relief, versions
from tests.engine.scheduler_world import World


def capabilities() -> dict[str, str]:
    """On a scheduler without connector, with KV events on."""
    world = World(blocks=64, events="inproc://kvctl-compat")
    engine = SimpleNamespace(scheduler=world.scheduler, vllm_config=world.config)
    found = versions.capabilities(engine)
    found.update(guards.install(world.scheduler).lacking())
    found["relieve"] = found["relieve"] or relief.missing(world.scheduler)
    world.scheduler.kv_event_publisher.shutdown()
    return found


if __name__ == "__main__":
    json.dump({"version": vllm.__version__, "path": vllm.__file__, "capabilities": capabilities()}, sys.stdout)
