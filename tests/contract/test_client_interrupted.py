"""Ctrl-C in blocking code: what was begun is left well before the caller goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest
from fake_sidecar_server import FakeSidecar
from kvctl.v1 import replica_pb2
from test_client_fleet import served_elsewhere

from sidecar import client


class Interrupted:
    """A future whose waiter gets Ctrl-C at a given moment."""

    def __init__(self, real: Future[object], moment: threading.Event) -> None:
        self._real = real
        self._moment = moment

    def result(self) -> object:
        assert self._moment.wait(60)
        raise KeyboardInterrupt

    def done(self) -> bool:
        return self._real.done()

    def cancel(self) -> bool:
        return self._real.cancel()


def test_ctrl_c_while_engines_are_being_paused_resumes_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    good, silent = FakeSidecar("good"), FakeSidecar("silent")
    paused, let_go = threading.Event(), asyncio.Event()

    async def hang(kind: str) -> None:
        if kind == "pause":
            await let_go.wait()

    silent.before = hang
    real = asyncio.run_coroutine_threadsafe
    with served_elsewhere(good, silent) as addresses, client.Fleet(addresses) as fleet:
        done = good._did

        def did(kind: str, request_id: str, answer: object) -> None:
            done(kind, request_id, answer)
            if kind == "pause":
                paused.set()

        good._did = did  # type: ignore[method-assign]
        update = fleet.weight_update("v2", step_timeout_s=60)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "run_coroutine_threadsafe", lambda *a: Interrupted(real(*a), paused))
            with pytest.raises(KeyboardInterrupt):
                update.__enter__()
        assert isinstance(good.requests[-1], replica_pb2.ResumeSchedulingRequest)


FORKED = """
import os
from sidecar.client import Fleet
fleet = Fleet(["r0=127.0.0.1:1"])
child = os.fork()
if child == 0:
    try:
        fleet.replicas()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    fleet.close()
    os._exit(0)
os.waitpid(child, 0)
fleet.close()
"""


def test_a_fleet_used_in_a_forked_child_is_refused_instead_of_waiting_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "RequestInvalid this fleet was made before a fork; make another one in this process\n"
