"""Looking without costing, asking only when something looks wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from kvctl.v1 import types_pb2 as types

from engine_bridge.page import Phase
from engine_bridge.protocol import Contiguity
from sidecar.backends.engine import Liveness, Lost, Unreachable
from sidecar.replica.history import SECOND
from sidecar.replica.sampler import Sampler
from tests.contract.engines_in_memory import MemoryEngine, MemoryEngines
from tests.unit.histories.tape import evidence, head, holder


def sampler(engines: MemoryEngines) -> Sampler:
    return Sampler(engines, engines.clock)


async def settle() -> None:
    """Let questions under way be answered."""
    for _ in range(5):
        await asyncio.sleep(0)


async def look(engines: MemoryEngines, watching: Sampler, seconds: float, **page: int) -> None:
    """Half a second at a time."""
    moved = bool(page.pop("moved", 0))
    for _ in range(round(seconds * 2)):
        engines.forward(0.5)
        engines.write(moved=moved, **page)
        watching.tick()
        await settle()


@pytest.mark.parametrize(
    "page",
    [
        {"running": 0, "waiting": 0},
        {"running": 8, "waiting": 0, "moved": 1},
        {"running": 2, "waiting": 3, "paused": 2},
        {"running": 0, "waiting": 0, "sleeping": 1},
    ],
)
async def test_nothing_is_asked_of_an_engine_while_nothing_looks_wrong(page: dict[str, int]):
    engines = MemoryEngines()
    await look(engines, sampler(engines), 120, **page)
    assert engines.listed[0].asked == []
    assert engines.listed[0].looks >= 240


async def test_a_standstill_is_asked_about_once_a_second_and_explained():
    engines = MemoryEngines()
    watching = sampler(engines)
    await look(engines, watching, 5, running=2, waiting=2, moved=1, blocks_free=27)
    engine = engines.listed[0]

    for second in range(10):
        engine.told = evidence(
            monotonic_ns=engines.now_ns,
            waiting=2,
            load_finished=2,
            waiting_holding_blocks=2,
            blocks_free=27,
            head=head(32),
            holders=[holder(67), holder(66)],
            oldest_waiting_ns=second * SECOND,
        )
        await look(engines, watching, 1, running=0, waiting=2, holding=2)
    assert 5 <= len(engine.asked) <= 10
    assert set(engine.asked) == {0}, "contiguity is only walked for a caller who asks"
    assert watching.snapshot().engines[0].verdict == types.VERDICT_HELD_BLOCKS_DEADLOCK
    assert watching.snapshot().stalled


async def test_a_queue_that_never_empties_is_asked_about_every_half_minute():
    engines = MemoryEngines()
    await look(engines, sampler(engines), 125, running=8, waiting=3, moved=1)
    assert 3 <= len(engines.listed[0].asked) <= 4


async def test_blocks_held_without_a_request_are_asked_about_and_not_all_the_time():
    engines = MemoryEngines()
    await look(engines, sampler(engines), 70, running=0, waiting=0, blocks_free=150)
    assert 1 <= len(engines.listed[0].asked) <= 3


async def test_status_asks_every_engine_and_reports_its_answer():
    engines = MemoryEngines([MemoryEngine(0), MemoryEngine(1, "11" * 16)])
    engines.write(0, running=1, moved=True)
    engines.write(1)
    told = evidence(
        monotonic_ns=engines.now_ns,
        running=1,
        waiting=1,
        blocks_free=99,
        head=head(3, waiting_s=2),
        oldest_waiting_ns=2 * SECOND,
        contiguity=Contiguity(11, 5, 6),
        weight_version="step-17",
    )
    engines.listed[0].told = told
    status = await sampler(engines).status()
    assert [engine.engine.data_parallel_rank for engine in status.engines] == [0, 1]
    first = status.engines[0]
    assert (first.requests.waiting, first.blocks.free, first.head.blocks_needed) == (1, 99, 3)
    assert first.oldest_waiting.seconds == 2
    assert (first.contiguity.ratio, first.weight_version) == (0.5, "step-17")
    assert first.contiguity.mean_run_length == pytest.approx(11 / 6)
    assert not first.from_page
    assert engines.listed[1].asked == [4096]


async def test_status_of_an_engine_that_does_not_answer_comes_from_its_page_in_time():
    engines = MemoryEngines()
    engines.write(running=3, waiting=1, holding=1, phase=Phase.STEP, blocks_free=7)
    engines.listed[0].hold = asyncio.Event()
    watching = sampler(engines)
    loop = asyncio.get_running_loop()
    began = loop.time()
    status = await watching.status(timeout_s=0.05)
    assert loop.time() - began < 0.5
    engine = status.engines[0]
    assert engine.from_page
    assert (engine.requests.running, engine.requests.waiting_remote_kv, engine.blocks.free) == (3, -1, 7)
    await watching.close()


async def test_callers_at_the_same_time_share_one_question():
    engines = MemoryEngines()
    engines.write()
    watching = sampler(engines)
    await asyncio.gather(*(watching.status() for _ in range(20)))
    assert len(engines.listed[0].asked) == 1


async def test_a_stopped_engine_is_not_asked_and_said_to_be_stopped():
    engines = MemoryEngines()
    engines.write(running=3)
    engines.listed[0].alive = Liveness.STOPPED
    status = await sampler(engines).status()
    assert status.engines[0].verdict == types.VERDICT_ENGINE_STOPPED
    assert engines.listed[0].asked == []


async def test_a_dead_engine_keeps_its_row_and_none_of_its_numbers():
    """vllm#21257."""
    engines = MemoryEngines()
    engines.write(running=3, moved=True)
    watching = sampler(engines)
    watching.tick()
    engines.listed[0].alive = Liveness.DEAD
    engines.listed[0].trouble = Unreachable("ENGINE_DEAD", "engine 0 (pid 100) is gone: its process has ended")
    status = await watching.status()
    engine = status.engines[0]
    assert engine.verdict == types.VERDICT_ENGINE_DEAD
    assert status.stalled
    assert (engine.requests.running, engine.blocks.total, engine.preemptions) == (-1, -1, -1)
    assert "pid 100" in engine.explanation


async def test_a_restarted_engine_begins_a_history_of_its_own():
    engines = MemoryEngines()
    watching = sampler(engines)
    await look(engines, watching, 5, running=3, moved=1)
    engines.listed[:] = [MemoryEngine(0, "22" * 16)]
    engines.write(phase=Phase.STARTING)
    watching.tick()
    assert [w.engine.incarnation for w in watching.watched] == ["22" * 16]
    assert watching.snapshot().engines[0].verdict == types.VERDICT_STARTING


async def test_an_idle_engine_that_stops_answering_is_asked_again_until_it_counts_as_hung():
    engines = MemoryEngines()
    engines.write()
    engines.listed[0].told = Lost("unknown", "no answer")
    watching = sampler(engines)
    await watching.status()
    for _ in range(30):
        engines.forward(0.5)
        watching.tick()
        await settle()
    assert watching.snapshot().engines[0].verdict == types.VERDICT_ENGINE_HUNG
    engines.listed[0].told = evidence(monotonic_ns=engines.now_ns)
    await watching.status()
    assert watching.snapshot().engines[0].verdict == types.VERDICT_IDLE


async def test_a_page_that_cannot_be_read_is_a_reason_and_not_a_crash():
    engines = MemoryEngines()
    engines.listed[0].torn = True
    status = await sampler(engines).status()
    assert status.engines[0].verdict == types.VERDICT_UNKNOWN
    assert "no consistent reading" in status.engines[0].explanation


@pytest.mark.parametrize(
    ("told", "verdict", "stalled", "words"),
    [
        ({}, types.VERDICT_IDLE, False, "no request is running or waiting"),
        ({"running": 2, "waiting": 1}, types.VERDICT_UNKNOWN, False, "2 requests running, 1 waiting"),
        ({"sleeping": True}, types.VERDICT_SLEEPING, False, "wake it"),
        ({"paused": "all", "scheduling": "paused"}, types.VERDICT_PAUSED, False, "kvctl scheduling resume"),
        ({"scheduling": "abandoned_update"}, types.VERDICT_PAUSED, True, "weight update was abandoned"),
        (
            {"waiting": 2, "waiting_holding_blocks": 2, "verdict": "HELD_BLOCKS_DEADLOCK", "holders": [holder(67)]},
            types.VERDICT_HELD_BLOCKS_DEADLOCK,
            True,
            "kvctl relieve",
        ),
    ],
)
async def test_a_damaged_page_is_told_and_the_engines_own_answer_judged(told, verdict, stalled, words):
    engines = MemoryEngines()
    engines.write(running=7)
    watching = sampler(engines)
    watching.tick()
    engines.forward(2)
    engines.listed[0].torn = True
    engines.listed[0].told = evidence(monotonic_ns=engines.now_ns, **told)
    found = (await watching.status()).engines[0]
    assert (found.verdict, found.stalled) == (verdict, stalled)
    assert words in found.explanation
    assert "has not answered" not in found.explanation
    says = [found.explanation, *found.warnings]
    assert any("no consistent reading); the engine answers on its socket" in text for text in says)
    assert found.requests.running == told.get("running", 0), "not the counts from before the damage"
    assert not found.from_page


async def test_an_engine_with_a_damaged_page_that_does_not_answer_is_unknown_for_both_reasons():
    engines = MemoryEngines()
    engines.listed[0].torn = True
    engines.listed[0].told = Lost("unknown", "silence")
    watching = sampler(engines)
    await watching.status()
    engines.forward(1)
    watching.tick()
    found = watching.snapshot().engines[0]
    assert found.verdict == types.VERDICT_UNKNOWN
    assert "no consistent reading), and it has not answered on its socket" in found.explanation


async def test_over_http_a_status_is_judged_by_counts_and_never_by_an_evidence_full_of_unknowns():
    engines = MemoryEngines([MemoryEngine(backend="http")])
    engines.listed[0].alive = Liveness.UNKNOWN
    engines.listed[0].told = evidence(waiting=3, waiting_holding_blocks=-1, blocks_orphaned=-1, head=None)
    watching = sampler(engines)
    await look(engines, watching, 5, running=1, waiting=3, moved=1, phase=-1)
    await look(engines, watching, 40, running=0, waiting=3, phase=-1)
    engines.listed[0].told = msgspec.structs.replace(engines.listed[0].told, monotonic_ns=engines.now_ns)
    status = await watching.status()
    assert (status.engines[0].verdict, status.engines[0].stalled) == (types.VERDICT_UNKNOWN, True)
    assert "only the engine bridge can see why" in status.engines[0].explanation


async def test_a_failing_question_does_not_end_the_watch():
    engines = MemoryEngines()
    engines.write()

    class Broken(MemoryEngine):
        async def evidence(self, timeout_s: float, contiguity_blocks: int = 4096) -> object:
            raise RuntimeError("boom")

    engines.listed[:] = [Broken(counters=engines.listed[0].counters)]
    watching = sampler(engines)
    status = await watching.status()
    assert status.engines[0].from_page
    engines.forward(0.5)
    watching.tick()


async def test_the_watch_runs_by_itself_and_ends_when_closed():
    engines = MemoryEngines()
    engines.write()
    watching = Sampler(engines, engines.clock, period_s=0.01)
    await watching.start()
    while engines.listed[0].looks < 5:  # noqa: ASYNC110 - bounded by the test's timeout
        await asyncio.sleep(0.005)
    await watching.close()
    looks = engines.listed[0].looks
    await asyncio.sleep(0.03)
    assert engines.listed[0].looks == looks


async def test_an_engine_that_appears_is_looked_at_at_once():
    engines = MemoryEngines([])
    watching = Sampler(engines, engines.clock, period_s=60)
    await watching.start()
    assert watching.watched == ()
    changed = asyncio.Event()
    watching.on_change(changed.set)
    engines.listed.append(MemoryEngine())
    engines.write()
    for callback in engines.callbacks:
        callback()
    async with asyncio.timeout(30):
        await changed.wait()
    assert watching.snapshot().engines[0].verdict == types.VERDICT_IDLE
    await watching.close()


async def test_evidence_that_is_old_says_nothing_about_now():
    engines = MemoryEngines()
    told = evidence(monotonic_ns=engines.now_ns, waiting=3, blocks_free=5, head=head(9))
    engines.write(waiting=3)
    engines.listed[0].told = told
    watching = sampler(engines)
    await watching.status()
    engines.listed[0].told = msgspec.structs.replace(told, monotonic_ns=engines.now_ns)
    engines.forward(30)
    engines.write(running=1, waiting=0, moved=True)
    watching.tick()
    engine = watching.snapshot().engines[0]
    assert not engine.HasField("head")
    assert engine.requests.waiting == 0
