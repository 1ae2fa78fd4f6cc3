"""Forks coordinators that kill themselves at a named point. Imports are paid once, so that hundreds of lives are cheap.

Commands on stdin, one JSON object a line, one answer each:
{"do": "start", "arguments": [...], "die_at": "after_call", "nth": 2} -> {"pid": ...}
{"do": "wait", "pid": ...} -> {"code": ...} (negative: killed by that signal)

The points are around what `execution` does for one target: the intent, the call, the result. The hooks are put in here,
in the child, from outside: the code of the coordinator knows nothing of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # nothing of gRPC has started when it forks

from sidecar.coordinator import app, config, fanout, journal

POINTS = ("before_intent", "after_intent", "before_call", "after_call", "before_result", "after_result")


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _live(command["arguments"], command.get("die_at", ""), command.get("nth", 1), command["log"])
            answer = {"pid": pid}
        else:
            _, status = os.waitpid(command["pid"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        print(json.dumps(answer), flush=True)


def _live(arguments: list[str], die_at: str, nth: int, log: str) -> None:
    code = 1
    try:
        os.close(0)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        if die_at:
            _arm(die_at, nth)
        code = app.run(config.load(arguments, {}))
    finally:
        os._exit(code)


def _arm(die_at: str, nth: int) -> None:
    when, what = die_at.split("_")
    owner: Any = fanout.GrpcReplicas if what == "call" else journal.StoreJournal
    real: Callable[..., Awaitable[Any]] = getattr(owner, what)
    seen = 0

    async def deadly(*given: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        mine = seen
        if when == "before" and mine == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await real(*given, **named)
        if when == "after" and mine == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, what, deadly)


main()
