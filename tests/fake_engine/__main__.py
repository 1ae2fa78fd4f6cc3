"""See the package's docstring."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.fake_engine.control import run_command
from tests.fake_engine.loop import FakeLoop, build
from tests.fake_engine.witness import Witness


def main() -> None:
    parser = argparse.ArgumentParser(prog="fake_engine")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--cached", type=int, default=8)
    parser.add_argument("--steps-per-second", type=float, default=0)
    parser.add_argument("--effects", type=Path)
    parser.add_argument("--replica", help="name in the history")
    parser.add_argument("--history", type=Path, help="lines for tests.robustness.history; needs --replica, --audit")
    parser.add_argument("--audit", type=Path, help="audit log of the sidecar beside this engine")
    parser.add_argument("--connector", choices=("absent", "true", "false", "none", "raise"), default="absent")
    parser.add_argument("--no-caching", action="store_true")
    parser.add_argument("--model", default="fake-model")
    parser.add_argument("--keep", action="store_true", help="live on after the end of stdin")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    loop = build(
        options.dir,
        rank=options.rank,
        dp_size=options.dp_size,
        requests=options.requests,
        blocks=options.blocks,
        cached=options.cached,
        caching=not options.no_caching,
        steps_per_second=options.steps_per_second,
        effects_file=options.effects,
        witness=Witness(options.history, options.replica, options.audit) if options.history else None,
        connector=options.connector,
        model=options.model,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.stop())
    threading.Thread(target=_serve_stdin, args=(loop, options.keep), daemon=True).start()
    loop.run()


def _serve_stdin(loop: FakeLoop, keep: bool) -> None:
    loop.attached.wait()
    if loop.bridge is None:
        _print({"ready": True, "name": "", "socket": "", "page": "", "incarnation": "", "pid": os.getpid()})
    else:
        _print(
            {
                "ready": True,
                "name": loop.bridge.name,
                "socket": os.fspath(loop.socket_path),
                "page": os.fspath(loop.page_path),
                "incarnation": loop.incarnation,
                "pid": os.getpid(),
            }
        )
    for line in sys.stdin:
        _print(run_command(loop, json.loads(line)))
    if not keep:
        loop.stop()


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


main()
