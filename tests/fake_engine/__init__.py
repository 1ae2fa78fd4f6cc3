"""An engine without vLLM: the real dispatcher, listener, page and waker over a model of a block pool.

In a test's own process, with the engine's loop in a thread:

    from tests.fake_engine import running_engine

    with running_engine(tmp_path, rank=0, requests=2) as engine:
        engine.socket_path, engine.page_path, engine.incarnation
        engine.do("hold", requests=1, blocks=4)     # commands run on the engine's thread, between two steps
        engine.do("state")                          # -> counts, effects so far, ...
        engine.effects                              # [{"request_id", "incarnation", "operation", "count"...}]

As a process of its own (killable, stoppable, hangable):

    python -m tests.fake_engine --dir D --rank 0 [--dp-size N] [--requests N] [--blocks N] [--cached N]
                                [--steps-per-second F] [--effects FILE] [--connector ANSWER] [--no-caching]

It prints one JSON line when it serves: {"ready": true, "name", "socket", "page", "incarnation", "pid"}. Each line on
its stdin is a command, {"do": NAME, ...arguments}; each gets one JSON line back on stdout. End of stdin ends it
cleanly, so that no engine outlives its test; `--keep` makes it live until a signal instead. `spawn_engine(...)` wraps
all of it. The commands are in control.py.

Every effect (prefix cache dropped, blocks reordered, preempted, relieved, paused, resumed) is appended to the effects
list and, with --effects, to a JSON-lines file that survives a kill: {"request_id", "incarnation", "effect", "rank"}.
"""

from tests.fake_engine.loop import FakeLoop, running_engine
from tests.fake_engine.model import FakeEngine
from tests.fake_engine.process import EngineProcess, spawn_engine

__all__ = ["EngineProcess", "FakeEngine", "FakeLoop", "running_engine", "spawn_engine"]
