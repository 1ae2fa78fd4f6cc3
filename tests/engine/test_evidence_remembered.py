"""Costly answers are remembered for a thousand times what they cost, and no change that matters is missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_bridge.engine import evidence, guards, waiting
from tests.engine.conftest import in_process_engine
from tests.engine.scheduler_world import BLOCK, World

pytestmark = pytest.mark.engine

US = 1_000


class Question:
    """Costs what it is told to, and answers how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_ns: int) -> None:
        self.now = self.spent = 10**12
        self.cost_ns = cost_ns
        self.asked = 0
        clocks = SimpleNamespace(monotonic_ns=lambda: self.now, thread_time_ns=lambda: self.spent)
        monkeypatch.setattr(evidence, "time", clocks)

    def __call__(self) -> int:
        self.spent += self.cost_ns
        self.asked += 1
        return self.asked


BIG = evidence.SMALL_BLOCKS + 1


def asker(question: Question) -> Callable[[object, int], int]:
    memo: evidence._Memo[int] = evidence._Memo()
    return lambda what, size: memo.ask(what, size, question)


def test_a_costly_answer_is_kept_for_a_thousand_times_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asker(question := Question(monkeypatch, 900 * US))
    assert ask("q", BIG) == 1
    question.now += 900_000 * US - 1
    assert ask("q", BIG) == 1
    question.now += 1
    assert ask("q", BIG) == 2


def test_no_answer_is_kept_for_longer_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asker(question := Question(monkeypatch, 50_000 * US))
    assert ask("q", BIG) == 1
    question.now += 2_000_000 * US
    assert ask("q", BIG) == 2


def test_what_looks_at_few_blocks_is_asked_afresh_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asker(Question(monkeypatch, 900 * US))
    assert [ask("q", size) for size in (BIG, BIG - 1, BIG - 1, BIG)] == [1, 2, 3, 1]


def test_another_question_is_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asker(Question(monkeypatch, 900 * US))
    assert [ask(depth, BIG) for depth in (10, 20, 20)] == [1, 2, 2]


def remember_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "SMALL_BLOCKS", 0)
    monkeypatch.setattr(evidence, "KEPT_TIMES", 10**9)
    monkeypatch.setattr(evidence, "LONGEST_KEPT_NS", 3600 * 10**9)


def test_orphaned_blocks_of_a_while_ago_are_never_more_than_are_held_now(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_for_ever(monkeypatch)
    world, remembered = World(blocks=64), evidence.Remembered()
    engine = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False))

    def orphaned() -> int:
        found = evidence.read_evidence(engine, guards.install(world.scheduler), 1, 0, remembered)
        return found.blocks_orphaned

    lost = world.pool.get_new_blocks(10)
    assert orphaned() == 10
    world.pool.free_blocks(lost[:4])
    assert orphaned() == 6
    world.pool.get_new_blocks(30)
    assert orphaned() == 10
    remembered.forget()
    assert orphaned() == 36


def test_what_we_change_ourselves_is_seen_at_once(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_for_ever(monkeypatch)
    with in_process_engine(engine_dir) as engine, engine.bridge() as bridge:
        untouched = bridge.admission(256).contiguity
        assert untouched is not None
        assert untouched.runs == 1
        names = [engine.add(list(range(8 + number, 72 + number)), 30) for number in range(6)]
        while not all(name in engine.finished for name in names):
            engine.take(engine.client.get_output())
        assert bridge.admission(256).contiguity == untouched
        assert bridge.reorder("uncached").state == "done"
        served = bridge.admission(256).contiguity
        assert served is not None
        assert served.runs > 1
        assert bridge.reorder("all_free").state == "done"
        assert bridge.admission(256).contiguity == untouched


def test_what_waiting_requests_hold_is_counted_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_for_ever(monkeypatch)
    world, remembered = World(blocks=256, connector="Remote"), evidence.Remembered()
    engine = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False))
    counted: list[str] = []
    blocks_of = waiting.blocks_of
    monkeypatch.setattr(
        waiting,
        "blocks_of",
        lambda scheduler, request: counted.append(request.request_id) or blocks_of(scheduler, request),
    )

    def holders() -> list[tuple[str, int, bool]]:
        counted.clear()
        found = evidence.read_evidence(engine, guards.install(world.scheduler), 1, 0, remembered)
        return [(holder.request_id, holder.blocks_held, holder.load_finished) for holder in found.holders]

    for name, blocks in (("a", 3), ("b", 5)):
        world.remote.hits[name] = blocks * BLOCK
        world.add(name, blocks * BLOCK + 1)
    world.step()
    assert holders() == [("b", 5, False), ("a", 3, False)]
    assert sorted(counted) == ["a", "b"]
    assert holders() == [("b", 5, False), ("a", 3, False)]
    assert counted == []
    world.scheduler.finished_recving_kv_req_ids.add("a")
    assert holders() == [("b", 5, False), ("a", 3, True)]
