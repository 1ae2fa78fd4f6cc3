"""An engine core in the caller's process: the bridge's thread and the caller share it and do each other no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_bridge import protocol
from engine_bridge.engine import pools
from engine_bridge.page import FLAG_WOKE_WITHOUT_RESET, Counters, PageReader
from tests.contract.engine_contract import reset_result
from tests.engine.conftest import ROOT, VllmEngineHarness, eventually, in_process_engine
from tests.engine.fake_vllm import expected_tokens
from tests.fake_engine.client import deadline, new_id

pytestmark = pytest.mark.engine

PROMPT = list(range(8, 72))


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[VllmEngineHarness]:
    with in_process_engine(engine_dir) as engine:
        yield engine


def step_to_the_end(engine: VllmEngineHarness, *names: str) -> None:
    for _ in range(20_000):
        if all(name in engine.finished for name in names):
            return
        engine.take(engine.client.get_output())
    raise AssertionError(engine.counts())


def counters(engine: VllmEngineHarness) -> Counters:
    reader = PageReader(engine.sockets()[0].with_suffix(".page"))
    try:
        return reader.read().counters
    finally:
        reader.close()


def test_an_engine_that_nobody_steps_answers(engine: VllmEngineHarness) -> None:
    name = engine.add(PROMPT, 10)
    step_to_the_end(engine, name)
    with engine.bridge() as bridge:
        assert reset_result(bridge.reset("fail")).cached_blocks_dropped > 0
        assert reset_result(bridge.reset("fail", reorder=True)).cached_blocks_dropped == 0


def test_resets_between_the_callers_steps_change_no_token(engine: VllmEngineHarness) -> None:
    names = [engine.add([*PROMPT, 100 + number], 400) for number in range(8)]
    done = threading.Event()
    kept: list[int] = []

    def disturb() -> None:
        with engine.bridge() as bridge:
            while not done.is_set():
                mode = "preempt" if len(kept) % 5 == 4 else "keep"
                kept.append(reset_result(bridge.reset(mode, reorder=True)).requests_kept)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        step_to_the_end(engine, *names)
    finally:
        done.set()
        thread.join(20)
    assert sum(kept) > 30
    for number, name in enumerate(names):
        assert engine.tokens[name] == expected_tokens([*PROMPT, 100 + number], 400)


def test_an_operation_that_raises_leaves_the_engine_serving(
    engine: VllmEngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(pool: object, attic: object) -> int:
        raise ZeroDivisionError("boom")

    with engine.bridge() as bridge:
        monkeypatch.setattr(pools, "drop_hashes", boom)
        outcome = bridge.reset("keep")
        monkeypatch.undo()
        assert outcome.state == "raised"
        assert outcome.message == "ZeroDivisionError: boom"
        name = engine.add(PROMPT, 10)
        step_to_the_end(engine, name)
        assert engine.tokens[name] == expected_tokens(PROMPT, 10)
        assert bridge.reset("keep").state == "done"


def test_a_defect_of_the_bridge_takes_its_hooks_off_and_the_engine_steps_on(
    engine: VllmEngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.client.engine_core
    monkeypatch.setattr(core._kvctl_bridge.page, "publish", None)
    name = engine.add(PROMPT, 10)
    step_to_the_end(engine, name)
    assert engine.tokens[name] == expected_tokens(PROMPT, 10)
    assert not list(engine.directory.glob("*.sock"))
    (note,) = engine.directory.glob("*.failed")
    assert "detached" in json.loads(note.read_text())["reason"]


def test_what_a_reset_leaves_behind_is_taken_down_by_the_steps_after_it(engine: VllmEngineHarness) -> None:
    attic = engine.client.engine_core._kvctl_bridge._port._attic
    with engine.bridge() as bridge:
        for _ in range(2):
            step_to_the_end(engine, engine.add(PROMPT, 10))
            assert not attic
            bridge.reset("keep")
            bridge.reset("keep")
            assert len(attic) == 1
    step_to_the_end(engine, engine.add(PROMPT, 10))
    assert not attic


def test_a_reset_by_others_is_noticed(engine: VllmEngineHarness) -> None:
    name = engine.add(PROMPT, 4)
    step_to_the_end(engine, name)
    with engine.bridge() as bridge:
        bridge.reset("keep")
        assert counters(engine).last_reset_mode == 3
        name = engine.add(PROMPT, 4)
        step_to_the_end(engine, name)
        assert counters(engine).last_reset_mode == 3
        assert engine.client.reset_prefix_cache()
        name = engine.add(PROMPT, 4)
        step_to_the_end(engine, name)
        assert counters(engine).last_reset_mode == 4


def test_waking_with_the_hashes_of_lost_memory_is_noticed_until_a_reset(engine: VllmEngineHarness) -> None:
    executor = engine.client.engine_core.model_executor
    name = engine.add(PROMPT, 4)
    step_to_the_end(engine, name)
    with engine.bridge() as bridge:
        executor.sleep()
        assert bridge.admission().sleeping
        assert bridge.reset("fail").state == "done"
        name = engine.add(PROMPT, 4)
        executor.wake_up()
        step_to_the_end(engine, name)
        assert not counters(engine).flags & FLAG_WOKE_WITHOUT_RESET
        executor.sleep()
        bridge.admission()
        eventually(lambda: counters(engine), lambda found: found.sleeping == 1)
        executor.wake_up()
        bridge.admission()
        eventually(lambda: counters(engine), lambda found: bool(found.flags & FLAG_WOKE_WITHOUT_RESET))
        assert bridge.admission().woke_without_reset
        assert bridge.reset("fail").state == "done"
        assert not bridge.admission().woke_without_reset


def test_an_engine_that_cannot_be_attached_to_serves(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    with in_process_engine(directory) as engine:
        name = engine.add(PROMPT, 10)
        step_to_the_end(engine, name)
        assert engine.tokens[name] == expected_tokens(PROMPT, 10)
        (note,) = directory.glob("*.failed")
        assert "107" in json.loads(note.read_text())["reason"]


def test_shutting_down_removes_the_files_and_ends_the_threads(engine_dir: Path) -> None:
    before = threading.active_count()
    with in_process_engine(engine_dir) as engine:
        assert len(engine.sockets()) == 1
    assert list(engine_dir.iterdir()) == []
    eventually(threading.active_count, lambda count: count <= before)


def test_a_program_that_ends_with_an_engine_that_nobody_shuts_down_leaves_no_files(engine_dir: Path) -> None:
    program = """
import os, pathlib
from tests.engine.conftest import in_process_engine

engine_dir = pathlib.Path(os.environ["KVCTL_ENGINE_DIR"])
kept = in_process_engine(engine_dir)
engine = kept.__enter__()
# Since 0.31 vLLM's client shuts its engine down by itself.
if hasattr(engine.client, "_finalizer"):
    engine.client._finalizer.detach()
print(len(list(engine_dir.glob("*.sock"))), flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "KVCTL_ENGINE_DIR": str(engine_dir)},
        stdout=subprocess.PIPE,
        timeout=200,
        check=True,
    )
    assert run.stdout.split()[-1:] == [b"1"]
    assert list(engine_dir.iterdir()) == []


def test_the_switch_keeps_everything_out_of_the_process() -> None:
    program = (
        "import sys, engine_bridge.plugin as plugin; plugin.register();"
        "sys.exit('engine_bridge.engine.hooks' in sys.modules or 'vllm' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={"KVCTL_BRIDGE": "0"}, timeout=60, check=False)
    assert run.returncode == 0


def test_hooks_are_put_on_once_and_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    from engine_bridge import plugin

    monkeypatch.setenv("KVCTL_ENGINE_DIR", str(tmp_path / "run"))
    plugin.register()
    hooked = [core.EngineCoreProc.run_busy_loop, core.DPEngineCoreProc.run_busy_loop, core.EngineCore.__init__]
    threads = threading.active_count()
    plugin.register()
    assert hooked == [core.EngineCoreProc.run_busy_loop, core.DPEngineCoreProc.run_busy_loop, core.EngineCore.__init__]
    assert threading.active_count() == threads
    assert not (tmp_path / "run").exists()


def test_a_pause_that_waits_for_steps_of_a_caller_who_makes_none_is_answered_and_keeps_nobody_waiting(
    engine_dir: Path,
) -> None:
    with in_process_engine(engine_dir, asynchronous=True) as engine:
        name = engine.add(PROMPT, 10)
        for _ in range(4):
            engine.take(engine.client.get_output())
        assert engine.client.engine_core.batch_queue
        with engine.bridge() as bridge:
            pause = bridge.post(lambda call: protocol.Pause(call, new_id(), deadline(1), 10**12))
            assert bridge.admission(0).running == 1
            outcome = bridge.answer(pause)
            assert isinstance(outcome, protocol.Outcome)
            assert outcome.state in ("withdrawn", "expired")
            assert bridge.admission(0).paused == ""
        step_to_the_end(engine, name)
        assert engine.tokens[name] == expected_tokens(PROMPT, 10)
