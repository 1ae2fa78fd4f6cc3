"""What stock vLLM shows over HTTP: counts, liveness, restarts, load balancers; which way is taken where both exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_bridge import protocol
from sidecar.backends.engine import Liveness, Unreachable
from sidecar.backends.http.engines import HttpEngine, PreferBridge
from tests.contract.fake_vllm_http import Answer, FakeVllm, metrics
from tests.contract.http_engines import engines, first, reset, soon


async def test_metrics_become_counts_and_what_they_do_not_tell_is_minus_one():
    vllm = FakeVllm()
    vllm.show(running=3, waiting=5, deferred=2, usage=0.25, preemptions=4)
    async with vllm, engines(vllm) as found:
        snapshot = first(found).page()
        told = await first(found).evidence(1.0)
    assert snapshot is not None
    counters = snapshot.counters
    assert (counters.running, counters.waiting, counters.deferred, counters.preemptions) == (3, 5, 2, 4)
    assert (counters.blocks_total, counters.blocks_free) == (160, 120)
    assert (counters.holding, counters.paused, counters.blocks_cached, counters.phase) == (-1, -1, -1, -1)
    assert isinstance(told, protocol.Evidence)
    assert (told.head, told.blocks_orphaned, told.oldest_waiting_ns) == (None, -1, -1)


async def test_an_older_vllm_without_some_families_leaves_them_unknown():
    vllm = FakeVllm("0.12.0")
    vllm.show(running=1, waiting=1, deferred=None, awake=None, started=None, usage=0.5, old_names=True)
    async with vllm, engines(vllm) as found:
        counters = first(found).page().counters
    assert (counters.running, counters.deferred, counters.sleeping, counters.blocks_free) == (1, -1, -1, 80)


async def test_a_sleeping_engine_is_seen_in_its_metrics():
    vllm = FakeVllm()
    vllm.show(awake=0)
    async with vllm, engines(vllm) as found:
        assert first(found).page().counters.sleeping == 1


async def test_nothing_listening_is_starting_before_and_dead_after_it_was_seen():
    vllm = FakeVllm()
    async with vllm:
        pass
    async with engines(vllm) as found:
        assert first(found).trouble.reason == "ENGINE_STARTING"
        async with vllm:
            await first(found).evidence(2.0)
            assert first(found).connected
        await first(found).evidence(2.0)
        assert first(found).trouble.reason == "ENGINE_DEAD"
        assert first(found).facts is None


async def test_an_api_server_whose_engine_core_died_is_dead():
    """vllm#39863."""
    vllm = FakeVllm()
    async with vllm, engines(vllm) as found:
        vllm.routes["GET /health"] = Answer(503)
        await first(found).evidence(2.0)
        assert first(found).liveness() is Liveness.DEAD
        assert first(found).trouble.reason == "ENGINE_DEAD"


async def test_a_restarted_server_is_another_incarnation():
    vllm = FakeVllm()
    async with vllm, engines(vllm) as found:
        before = first(found).incarnation, first(found).key
        vllm.show(started=2000.25)
        await first(found).evidence(2.0)
        assert (first(found).incarnation, first(found).key) != before


async def test_a_restart_without_a_start_time_shows_in_counters_that_fall():
    vllm = FakeVllm()
    vllm.show(started=None, tokens=500)
    async with vllm, engines(vllm) as found:
        before = first(found).incarnation
        vllm.show(started=None, tokens=600)
        await first(found).evidence(2.0)
        assert first(found).incarnation == before
        vllm.show(started=None, tokens=5)
        await first(found).evidence(2.0)
        assert first(found).incarnation != before


async def test_a_load_balancer_is_detected_and_said():
    """vllm/router#136: the target is a load balancer."""
    vllm = FakeVllm().dev()
    async with vllm, engines(vllm) as found:
        vllm.show(started=2000.25)
        await first(found).evidence(2.0)
        assert first(found).connected, "one change is a restart"
        vllm.show(started=1000.5)
        await first(found).evidence(2.0)
        answer = await first(found).submit(reset(), soon())
    assert isinstance(answer, Unreachable)
    assert answer.reason == "NOT_ONE_REPLICA"
    assert "load balancer" in answer.message
    assert vllm.resets == []


async def test_something_that_is_not_vllm_is_said_to_be_so():
    vllm = FakeVllm()
    vllm.routes["GET /metrics"] = Answer(body="<html>hello</html>")
    async with vllm, engines(vllm) as found:
        assert "expected vLLM's API server" in first(found).trouble.message


async def test_progress_is_dated_by_rising_tokens_only():
    vllm = FakeVllm()
    vllm.show(running=1, tokens=10)
    async with vllm, engines(vllm) as found:
        assert first(found).page().counters.last_progress_ns == 0, "one look shows no movement"
        vllm.show(running=1, tokens=12)
        await first(found).evidence(2.0)
        moved = first(found).page().counters.last_progress_ns
        assert moved > 0
        await first(found).evidence(2.0)
        assert first(found).page().counters.last_progress_ns == moved


async def test_a_token_is_read_for_each_request_trimmed_and_sent_as_a_bearer(tmp_path: Path):
    """kubernetes#52919: a newline at a token's end."""
    token = tmp_path / "token"
    token.write_text("one\n")
    vllm = FakeVllm()
    async with vllm, engines(vllm, token_file=token) as found:
        assert "Authorization: Bearer one\r\n" in vllm.headers[-1]
        token.write_text("# the new one\ntwo\nthree\n")
        await first(found).evidence(2.0)
        assert "Authorization: Bearer two\r\n" in vllm.headers[-1]


async def test_an_unreadable_token_file_is_named():
    vllm = FakeVllm()
    async with vllm, engines(vllm, token_file=Path("/nonexistent/token")) as found:
        assert "/nonexistent/token cannot be read" in first(found).trouble.message


# --- both ways ---------------------------------------------------------------------------------------------------


class OneBridgeEngine:
    """An EngineSet as the bridge gives it."""

    place = "/run/kvctl"

    def __init__(self, introduced: bool, present: bool = True) -> None:
        engine = type("E", (), {"facts": object() if introduced else None, "connected": introduced, "rank": 0})
        self.listed = [engine()] if present else []

    def engines(self) -> list[Any]:
        return self.listed

    def trouble(self) -> Unreachable | None:
        return None if self.listed else Unreachable("NO_ENGINE", "none")

    def on_change(self, callback: Any) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...


async def test_where_both_exist_the_bridge_is_preferred_and_http_fills_in_until_then():
    vllm = FakeVllm()
    async with vllm, engines(vllm) as http:
        bridge = OneBridgeEngine(introduced=True)
        assert PreferBridge(bridge, http).engines() == bridge.listed
        assert isinstance(PreferBridge(OneBridgeEngine(introduced=False), http).engines()[0], HttpEngine)
        assert isinstance(PreferBridge(OneBridgeEngine(False, present=False), http).engines()[0], HttpEngine)


def test_a_metrics_page_of_vllm_names_every_family_that_is_read():
    assert "vllm:kv_cache_usage_perc" in metrics()
