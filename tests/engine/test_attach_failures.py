"""Every step of attaching may fail: the engine serves without the bridge, nothing is left behind but a note that says
why, and the sidecar finds it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from engine_bridge import attach, places
from engine_bridge.engine import core, guards, hooks, versions
from engine_bridge.engine.in_force import Layer
from engine_bridge.listener import Listener
from engine_bridge.waker import Waker
from tests.engine.fake_vllm import expected_tokens
from tests.engine.stepped_engine import Loop

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(40)]

STEPS: dict[str, tuple[Any, str]] = {
    "the directory": (places, "prepare_directory"),
    "the rank": (core, "rank_of"),
    "the engine's identity": (core, "_identity"),
    "the capabilities": (versions, "capabilities"),
    "the guards": (guards, "install"),
    "the length of the path": (places, "check_socket_path"),
    "the remains of others": (places, "remove_stale"),
    "the page": (attach, "PageWriter"),
    "the page's mode": (places, "share"),
    "the dispatcher": (attach, "Dispatcher"),
    "the socket": (attach, "Listener"),
    "the socket's descriptor": (Listener, "fileno"),
    "the waker": (attach, "Waker"),
    "the waker's thread": (threading.Thread, "start"),
    "the hooks": (Layer, "lay"),
}


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """One engine for all: what fails leaves it as it was."""
    loop = Loop(asynchronous=False, connector=False, blocks=64, max_model_len=480)
    loop.bridge.break_down(RuntimeError("the bridge of the fixture goes"))
    loop._patch.setattr(attach, "Waker", Waker)
    yield loop
    loop.engine.shutdown()
    loop._patch.undo()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("e")
    monkeypatch.setenv("KVCTL_ENGINE_DIR", str(path))
    return path


def serves(loop: Loop, name: str) -> None:
    loop.add(name, PROMPT, 5)
    said: list[int] = []
    while len(said) < 5:
        loop.engine._process_input_queue()
        loop.engine._process_engine_step()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert said == expected_tokens(PROMPT, 5)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


NO_SPACE = OSError(28, "No space left on device")
NO_SUCH_THING = AttributeError("no such thing")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [NO_SPACE, NO_SUCH_THING], ids=["OSError", "AttributeError"])
def test_an_attach_that_fails_leaves_the_engine_serving_and_a_note(
    loop: Loop, directory: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    engine_before, scheduler_before = dict(vars(loop.engine)), set(vars(loop.scheduler))
    threads, open_files = threading.active_count(), descriptors()
    monkeypatch.setattr(*STEPS[step], fails)
    assert hooks.attach_to_process(loop.engine) is None
    monkeypatch.undo()
    (note,) = directory.iterdir()
    assert note.suffix == ".failed"
    assert str(error.args[-1]) in json.loads(note.read_text())["reason"]
    assert threading.active_count() <= threads
    assert descriptors() <= open_files
    hooked = {key for key, value in vars(loop.engine).items() if engine_before.get(key) is not value}
    assert hooked <= {"_kvctl_bridge", "_handle_client_request"}, "only wake-ups under way are still caught"
    assert set(vars(loop.scheduler)) == scheduler_before
    serves(loop, f"{step} {error!r}")


def test_an_engine_whose_rank_cannot_be_told_serves_and_the_note_says_so(
    loop: Loop, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.engine, "engine_index", "first")
    assert hooks.attach_to_process(loop.engine) is None
    (note,) = directory.iterdir()
    assert "ValueError" in json.loads(note.read_text())["reason"]
    serves(loop, "without a rank")


def test_what_cannot_be_hooked_later_takes_out_what_was_hooked_first(
    loop: Loop, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay, laid = Layer.lay, []

    def third_fails(layer: Layer) -> None:
        laid.append(layer)
        if len(laid) == 3:
            raise RuntimeError("no third")
        lay(layer)

    before = {name: vars(loop.engine)[name] for name in ("step_fn",)}
    monkeypatch.setattr(Layer, "lay", third_fails)
    assert hooks.attach_to_process(loop.engine) is None
    monkeypatch.undo()
    (note,) = directory.iterdir()
    assert "no third" in json.loads(note.read_text())["reason"]
    assert {name: vars(loop.engine)[name] for name in before} == before
    assert "_process_input_queue" not in vars(loop.engine)
    serves(loop, "after the third")


def test_a_bridge_that_cannot_even_be_closed_does_not_keep_the_engine_from_ending(
    loop: Loop, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = hooks.attach_to_process(loop.engine)
    assert bridge is not None

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bridge._dispatcher, "stop", fails)
    monkeypatch.setattr(Path, "unlink", fails)
    bridge.close()
    monkeypatch.undo()
    assert bridge.closed
    serves(loop, "after all")


@pytest.mark.parametrize(("level", "told"), [(logging.INFO, True), (logging.WARNING, False)])
def test_what_the_bridge_says_goes_where_vllms_own_lines_go_and_from_vllms_level_on(
    loop: Loop, directory: Path, level: int, told: bool
) -> None:
    vllms = logging.getLogger("vllm")
    before, said = vllms.level, queue.SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(said)
    vllms.addHandler(handler)
    vllms.setLevel(level)
    try:
        bridge = hooks.attach_to_process(loop.engine)
        assert bridge is not None
        bridge.break_down(RuntimeError("gone"))
    finally:
        vllms.setLevel(before)
        vllms.removeHandler(handler)
    lines = [said.get_nowait().getMessage() for _ in range(said.qsize())]
    assert any("kvctl: engine bridge attached at" in line for line in lines) is told


def test_a_wake_up_of_a_bridge_that_is_gone_reaches_no_stock_code(
    loop: Loop, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = hooks.attach_to_process(loop.engine)
    assert bridge is not None
    loop.engine.input_queue.put_nowait((hooks.WAKE, None))
    bridge.break_down(RuntimeError("gone"))
    caplog.clear()
    serves(loop, "woken")
    with pytest.raises(queue.Empty):
        loop.engine.input_queue.get_nowait()
    assert not [record for record in caplog.records if "Unrecognized" in record.getMessage()]
    assert EngineCoreRequestType.WAKEUP is not hooks.WAKE
