"""Ctrl-C in blocking code: what was begun is left well before the caller goes on."""

from __future__ import annotations

import asyncio
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
