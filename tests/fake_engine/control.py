"""Commands: what a test can do to a fake engine, the same in its own process and over a pipe.

hold(requests=1, blocks=2)           running requests that hold blocks
hold_waiting(blocks=2, state="waiting"|"loading"|"loaded")
hold_transfer(blocks=1)              blocks held by no request
release()                            every request ends, transfers too
cache(blocks)                        so many free blocks carry a hash
scramble()                           free queue in an order without neighbours
hang(seconds=60) / unhang()          the engine thread stays inside a step
hold_at(point) / let_go()            the engine thread stays at "before_effect" or "after_effect", see gate.py
wait_held(seconds=60)                until it is there; an error when it does not come
raise_in(method, message="boom")     that port method raises; message="" ends it
slow(method, seconds)                that port method takes so long
stick() / unstick()                  a reorder yields for ever
connector(answer="absent"|"true"|"false"|"none"|"raise")
capability(name, reason="")          switched off with a reason, on without
settle(steps)                        so many model steps are in flight, and a preempt must wait for them
deadlock(on=True)                    admissions are deadlocked (hold_waiting with state="loaded" gives holders)
pause() / unpause()                  as if vLLM itself had paused
sleep(on=True)                       the executor sleeps, or wakes without what its caches name
stop()                               a clean end
die(code=9)                          os._exit, nothing cleaned up (processes only)
state()                              counts and effects
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_engine.loop import FakeLoop


def run_command(loop: FakeLoop, command: dict[str, Any]) -> dict[str, Any]:
    """Run one command; {"ok": false, "error": ...} says what is wrong with it."""
    arguments = dict(command)
    name = arguments.pop("do", "")
    try:
        match name:
            case "hang":
                seconds = float(arguments.get("seconds", 60))
                loop.post(lambda: loop.hang(seconds))
                return {"ok": loop.hung.wait(10)}
            case "hold_at":
                loop.gate.hold_at(arguments["point"])
                return {"ok": True}
            case "wait_held":
                held = loop.gate.wait_held(float(arguments.get("seconds", 60)))
                return {"ok": True} if held else {"ok": False, "error": "the engine did not come to the point"}
            case "let_go":
                loop.gate.let_go()
                return {"ok": True}
            case "unhang":
                loop.unhang.set()
                return {"ok": True}
            case "stop":
                loop.stop()
                return {"ok": True}
            case "die":
                os._exit(int(arguments.get("code", 9)))
            case _:
                result = loop.call(lambda: _on_engine_thread(loop, name, arguments))
                return {"ok": True, **(result or {})}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _on_engine_thread(loop: FakeLoop, name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    engine = loop.engine
    match name:
        case "hold":
            blocks = int(arguments.get("blocks", 2))
            return {"requests": [engine.add("running", blocks) for _ in range(int(arguments.get("requests", 1)))]}
        case "hold_waiting":
            return {"request": engine.add(arguments.get("state", "waiting"), int(arguments.get("blocks", 2)))}
        case "hold_transfer":
            engine.hold_transfer(int(arguments.get("blocks", 1)))
        case "release":
            for request_id in list(engine.requests):
                engine.end(request_id)
            engine.end_transfers()
        case "cache":
            engine.cached = set(engine.free[: int(arguments["blocks"])])
        case "scramble":
            engine.free = engine.free[::2] + engine.free[1::2]
        case "raise_in":
            engine.raise_in.pop(arguments["method"], None)
            if arguments.get("message", "boom"):
                engine.raise_in[arguments["method"]] = arguments.get("message", "boom")
        case "slow":
            engine.slow[arguments["method"]] = float(arguments["seconds"])
        case "stick":
            engine.stuck = True
        case "unstick":
            engine.stuck = False
        case "connector":
            engine.connector = arguments["answer"]
        case "capability":
            engine.lacking[arguments["name"]] = arguments.get("reason", "")
        case "settle":
            engine.needs_settling, engine.steps_in_flight = True, int(arguments["steps"])
        case "deadlock":
            engine.deadlocked = bool(arguments.get("on", True))
        case "pause":
            engine.pause_owner = "vllm"
        case "unpause":
            engine.pause_owner = ""
        case "sleep":
            engine.sleep(bool(arguments.get("on", True)))
        case "state":
            return {
                "running": engine.running_requests(),
                "requests": {
                    r.request_id: {"state": r.state, "blocks": len(r.blocks)} for r in engine.requests.values()
                },
                "held_blocks": engine.held_blocks(),
                "cached_blocks": engine.cached_blocks(),
                "tokens": engine.tokens,
                "preemptions": engine.preemptions,
                "paused": engine.pause_owner,
                "weight_version": engine.version,
                "free": list(engine.free),
                "effects": list(loop.effects),
            }
        case _:
            raise ValueError(f"no such command: {name!r}")
    return None
