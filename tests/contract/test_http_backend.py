"""Stock vLLM over HTTP: every reply shape of vLLM 0.12 to 0.33, read for what it is."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Liveness, Lost, Unreachable
from sidecar.backends.http.client import NoReplyError, NotHttpError, NotSentError, parse_url, request
from sidecar.backends.http.engines import HttpEngine, HttpEngines, PreferBridge
from tests.contract.fake_vllm_http import Answer, FakeVllm, metrics


def reset(running: str = "fail", request_id: str = "", **asked: bool) -> protocol.Reset:
    return protocol.Reset(1, request_id or str(uuid.uuid4()), 0, running, **asked)  # type: ignore[arg-type]


def soon(seconds: float = 5.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@asynccontextmanager
async def engines(vllm: FakeVllm, **options: Any) -> AsyncIterator[HttpEngines]:
    found = HttpEngines(vllm.url, poll_s=3600, **options)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


def first(found: HttpEngines) -> HttpEngine:
    engine = found.engines()[0]
    assert isinstance(engine, HttpEngine)
    return engine


async def outcome(vllm: FakeVllm, mutation: protocol.Mutation) -> protocol.Outcome:
    async with vllm, engines(vllm) as found:
        answer = await first(found).submit(mutation, soon())
        assert isinstance(answer, Answered), answer
        return answer.outcome


def tiers(result: protocol.Outcome) -> dict[str, str]:
    assert isinstance(result.result, protocol.ResetResult)
    names = ("prefix", "connector", "multimodal", "encoder")
    return {name: getattr(result.result, name).state for name in names}


# --- replies -----------------------------------------------------------------------------------------------------


async def test_success_true_is_done():
    result = await outcome(FakeVllm().dev(), reset())
    assert result.state == "done"
    assert tiers(result)["prefix"] == "done"
    assert result.result.cached_blocks_dropped == -1, "vLLM does not tell how many, and 0 would say: none"


async def test_success_false_is_refused_and_names_the_requests_that_metrics_show():
    """vllm#12284."""
    vllm = FakeVllm().dev(Answer(body='{"success":false}'))
    vllm.show(running=3, waiting=2, usage=0.5)
    result = await outcome(vllm, reset())
    assert (result.state, result.reason) == ("refused", "BLOCKS_HELD_BY_REQUESTS")
    assert "3 requests running and 2 waiting" in result.message
    assert result.retry_after_ms > 0


async def test_success_false_without_any_request_is_held_by_transfers():
    """vllm#41180: never "wait for requests" when there are none."""
    result = await outcome(FakeVllm().dev(Answer(body='{"success":false}')), reset())
    assert result.reason == "BLOCKS_HELD_BY_TRANSFERS"


@pytest.mark.parametrize("version", ["0.12.0", "0.25.1", "0.33.0"])
async def test_an_empty_200_is_unconfirmed_and_never_a_success(version: str):
    """Python front end before 0.26; the Rust front end in every version."""
    result = await outcome(FakeVllm(version).dev(Answer()), reset())
    assert (result.state, result.reason) == ("partial", "UNCONFIRMED")
    assert tiers(result)["prefix"] == "unconfirmed"


@pytest.mark.parametrize(
    "body", ['{"success":"true"}', '{"success":1}', "{}", "[]", '{"status":"ok"}', "<html>login</html>", "true"]
)
async def test_a_200_of_another_shape_is_unconfirmed(body: str):
    result = await outcome(FakeVllm().dev(Answer(body=body)), reset())
    assert (result.state, result.reason) == ("partial", "UNCONFIRMED")


async def test_a_chunked_reply_is_read_whole():
    result = await outcome(FakeVllm().dev(Answer(body='{"success": true}', chunked=True)), reset())
    assert result.state == "done"


async def test_without_dev_mode_the_reset_needs_dev_mode_and_nothing_is_sent():
    vllm = FakeVllm()
    result = await outcome(vllm, reset())
    assert (result.state, result.reason) == ("unsupported", "NEEDS_DEV_MODE")
    assert "VLLM_SERVER_DEV_MODE=1" in result.message
    assert vllm.resets == []


async def test_a_404_to_the_post_itself_needs_dev_mode():
    vllm = FakeVllm().dev(Answer(404, '{"detail":"Not Found"}'))
    result = await outcome(vllm, reset())
    assert (result.state, result.reason) == ("unsupported", "NEEDS_DEV_MODE")


async def test_dev_mode_switched_on_by_a_restart_is_noticed():
    vllm = FakeVllm()
    async with vllm, engines(vllm) as found:
        assert "NEEDS" not in (first(found).facts or pytest.fail("no facts")).capabilities["admission"]
        vllm.dev()
        answer = await first(found).submit(reset(), soon())
    assert isinstance(answer, Answered)
    assert answer.outcome.state == "done"


async def test_a_500_after_a_preempt_says_that_requests_were_preempted():
    vllm = FakeVllm().dev(Answer(500, "Internal Server Error"))
    result = await outcome(vllm, reset("preempt"))
    assert (result.state, result.reason) == ("raised", "OPERATION_RAISED")
    assert "preempted first" in result.message


@pytest.mark.parametrize(("status", "reason"), [(401, "ENGINE_NOT_TRUSTED"), (503, "ENGINE_NOT_ANSWERING")])
async def test_a_denial_or_an_unavailable_proxy_is_unreachable(status: int, reason: str):
    vllm = FakeVllm().dev(Answer(status, "no"))
    async with vllm, engines(vllm) as found:
        answer = await first(found).submit(reset(), soon())
    assert isinstance(answer, Unreachable)
    assert answer.reason == reason


# --- options reach the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutation", "query"),
    [
        (reset(), "reset_running_requests=false&reset_external=false"),
        (reset("preempt"), "reset_running_requests=true&reset_external=false"),
        (reset(connector=True), "reset_running_requests=false&reset_external=true"),
        (reset("preempt", connector=True), "reset_running_requests=true&reset_external=true"),
    ],
)
async def test_every_option_reaches_vllm_under_its_own_name(mutation: protocol.Reset, query: str):
    """sglang#36150. The connector's parameter is called reset_external."""
    vllm = FakeVllm().dev()
    await outcome(vllm, mutation)
    assert vllm.resets == [f"/reset_prefix_cache?{query}"]


async def test_other_tiers_are_asked_for_and_stay_unconfirmed():
    vllm = FakeVllm().dev()
    result = await outcome(vllm, reset(mm=True, encoder=True))
    assert vllm.resets[1:] == ["/reset_mm_cache", "/reset_encoder_cache"]
    assert tiers(result) == {
        "prefix": "done",
        "connector": "not_requested",
        "multimodal": "unconfirmed",
        "encoder": "unconfirmed",
    }
    assert (result.state, result.reason) == ("partial", "UNCONFIRMED")


async def test_other_tiers_are_left_alone_when_the_prefix_cache_was_refused():
    vllm = FakeVllm().dev(Answer(body='{"success":false}'))
    result = await outcome(vllm, reset(mm=True, encoder=True))
    assert len(vllm.resets) == 1
    assert tiers(result)["multimodal"] == "not_run"


async def test_a_connector_reset_is_never_confirmed_over_http():
    """LMCache#4993: None, "cannot", counts as success inside vLLM; so does having no connector."""
    result = await outcome(FakeVllm().dev(), reset(connector=True))
    assert tiers(result) == {
        "prefix": "done",
        "connector": "unconfirmed",
        "multimodal": "not_requested",
        "encoder": "not_requested",
    }
    assert result.state == "partial"


async def test_a_refusal_with_the_connector_asked_for_is_told_apart_by_asking_without_it():
    """vllm#42693, vllm#39723: one "false" for two tiers."""
    vllm = FakeVllm().dev(Answer(body='{"success":false}'))

    async def without_the_connector_it_works() -> None:
        await vllm.posted.wait()
        vllm.routes["POST /reset_prefix_cache"] = Answer(body='{"success":true}')

    flip = asyncio.create_task(without_the_connector_it_works())
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    result = await outcome(vllm, reset(connector=True))
    await flip
    assert (result.state, result.reason) == ("pending", "CONNECTOR_BUSY")
    assert tiers(result)["prefix"] == "done"
    assert tiers(result)["connector"] == "pending"
    assert [path.partition("?")[2] for path in vllm.resets] == [
        "reset_running_requests=false&reset_external=true",
        "reset_running_requests=false",
    ]


async def test_a_preempt_is_not_repeated_to_tell_the_tiers_apart():
    vllm = FakeVllm().dev(Answer(body='{"success":false}'))
    result = await outcome(vllm, reset("preempt", connector=True))
    assert len(vllm.resets) == 1, "a second one would preempt twice"
    assert (tiers(result)["prefix"], tiers(result)["connector"]) == ("done", "pending")


# --- what needs the bridge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutation", "named"),
    [
        (reset("keep"), "reset.keep"),
        (reset(quarantine=True), "reset.quarantine"),
        (reset(wait_for_idle=True), "reset.wait_for_idle"),
        (reset(reorder=True), "reorder.idle"),
        (protocol.Reorder(1, str(uuid.uuid4()), 0, "uncached"), "reorder"),
        (protocol.Relieve(1, str(uuid.uuid4()), 0), "relieve"),
        (protocol.Pause(1, str(uuid.uuid4()), 0, 1_000_000_000), "pause"),
        (protocol.Resume(1, str(uuid.uuid4()), 0), "resume"),
    ],
)
async def test_what_only_the_bridge_can_do_says_so_and_sends_nothing(mutation: protocol.Mutation, named: str):
    """vllm-omni#6739: a stub must not answer OK."""
    vllm = FakeVllm().dev()
    result = await outcome(vllm, mutation)
    assert (result.state, result.reason) == ("unsupported", "NEEDS_ENGINE_BRIDGE")
    assert named in result.message
    assert "bridge" in result.message
    assert vllm.resets == []


async def test_capabilities_name_what_is_missing_and_what_would_give_it():
    vllm = FakeVllm().dev()
    async with vllm, engines(vllm) as found:
        facts = first(found).facts
    assert facts is not None
    assert set(facts.capabilities) == set(protocol.CAPABILITIES)
    assert facts.capabilities["reset.fail"] == ""
    assert "engine bridge" in facts.capabilities["reset.keep"]
    assert (facts.vllm_version, facts.model, facts.block_size, facts.blocks) == ("0.33.0", 'tiny "x", y', 16, 160)


# --- time and repetition -----------------------------------------------------------------------------------------


async def test_a_reset_without_an_answer_in_time_is_unknown_and_its_end_can_be_looked_up():
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        began = time.monotonic()
        answer = await engine.submit(asked, soon(0.2))
        assert time.monotonic() - began < 10
        assert isinstance(answer, Lost)
        assert answer.execution == "unknown"
        looked = await engine.lookup(asked.request_id, soon())
        assert isinstance(looked, protocol.Found)
        assert (looked.known, looked.outcome) == (True, None)
        gate.set()
        answer = await engine.submit(asked, soon())
        assert isinstance(answer, Answered)
        assert answer.outcome.state == "done"
        looked = await engine.lookup(asked.request_id, soon())
        assert looked.outcome is not None
    assert len(vllm.resets) == 1, "a repeat joins and never posts again"


async def test_a_repeat_returns_the_record_and_other_arguments_are_refused():
    vllm = FakeVllm().dev()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        await engine.submit(asked, soon())
        again = await engine.submit(asked, soon())
        other = await engine.submit(reset("preempt", asked.request_id), soon())
    assert isinstance(again, Answered)
    assert again.outcome.replayed
    assert isinstance(other, Answered)
    assert other.outcome.state == "mismatch"
    assert len(vllm.resets) == 1


async def test_a_second_reset_meanwhile_is_busy_with_the_first_ones_id():
    """sglang#21490."""
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    one = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        running = asyncio.create_task(engine.submit(one, soon()))
        await vllm.posted.wait()
        answer = await engine.submit(reset(), soon())
        gate.set()
        await running
    assert isinstance(answer, Answered)
    assert (answer.outcome.state, answer.outcome.other_request_id) == ("busy", one.request_id)


async def test_a_connection_that_breaks_after_sending_is_unknown():
    vllm = FakeVllm().dev(Answer(drop=True))
    async with vllm, engines(vllm) as found:
        answer = await first(found).submit(reset(), soon())
    assert isinstance(answer, Lost)
    assert answer.execution == "unknown"


async def test_a_refused_connection_sent_nothing_and_may_be_tried_again_under_the_same_id():
    vllm = FakeVllm().dev()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        await vllm.stop()
        answer = await engine.submit(asked, soon())
        assert isinstance(answer, Unreachable)
        assert not answer.sent
        async with vllm:
            answer = await engine.submit(asked, soon())
    assert isinstance(answer, Answered)
    assert answer.outcome.state == "done"


async def test_nothing_that_was_sent_can_be_cancelled():
    vllm = FakeVllm().dev()
    gate = vllm.routes["POST /reset_prefix_cache"].hold = asyncio.Event()
    asked = reset()
    async with vllm, engines(vllm) as found:
        engine = first(found)
        running = asyncio.create_task(engine.submit(asked, soon()))
        await vllm.posted.wait()
        cancelled = await engine.cancel(asked.request_id, soon())
        gate.set()
        await running
    assert isinstance(cancelled, protocol.Cancelled)
    assert not cancelled.cancelled


# --- data parallel -----------------------------------------------------------------------------------------------


async def both_ranks(vllm: FakeVllm) -> list[protocol.Outcome]:
    asked = reset()
    async with vllm, engines(vllm) as found:
        answers = await asyncio.gather(*(engine.submit(asked, soon()) for engine in found.engines()))
    assert all(isinstance(answer, Answered) for answer in answers)
    return [answer.outcome for answer in answers if isinstance(answer, Answered)]


async def test_ranks_share_one_post_and_answer_each_for_itself():
    vllm = FakeVllm("0.32.0").dev()
    vllm.show(ranks=2)
    results = await both_ranks(vllm)
    assert [result.state for result in results] == ["done", "done"]
    assert len(vllm.resets) == 1


async def test_before_0_32_only_the_first_rank_is_confirmed():
    vllm = FakeVllm("0.31.0").dev()
    vllm.show(ranks=2)
    results = await both_ranks(vllm)
    assert [result.state for result in results] == ["done", "partial"]
    assert "first rank's result only" in results[1].message


async def test_a_refusal_with_several_ranks_says_that_vllm_names_none():
    vllm = FakeVllm("0.32.0").dev(Answer(body='{"success":false}'))
    vllm.show(ranks=2)
    results = await both_ranks(vllm)
    assert all(result.state == "refused" and "names none of its 2 ranks" in result.message for result in results)


# --- what is seen ------------------------------------------------------------------------------------------------


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
        token.write_text("two\n")
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


# --- the client --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("127.0.0.1:8000", "expected http"),
        ("http://", "names no host"),
        ("http://u:secret@h:1", "must not hold credentials"),
        ("http://h:1/?x=1", "without"),
        ("http://h:99999", "out of range"),
    ],
)
def test_an_unusable_url_is_refused_in_words_and_without_its_password(url: str, what: str):
    with pytest.raises(ValueError, match=what) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_urls_are_parsed_with_ports_paths_and_ipv6():
    assert parse_url("http://[::1]:8000/x/").url == "http://[::1]:8000/x"
    assert parse_url("https://vllm").port == 443
    assert parse_url("http://127.0.0.1:1").loopback
    assert not parse_url("http://vllm:1").loopback


async def test_the_client_tells_not_sent_from_no_reply():
    vllm = FakeVllm()
    async with vllm:
        vllm.routes["GET /gone"] = Answer(drop=True)
        with pytest.raises(NoReplyError):
            await request(parse_url(vllm.url), "GET", "/gone", 2.0)
        vllm.routes["GET /slow"] = Answer(hold=asyncio.Event())
        with pytest.raises(NoReplyError, match="no answer within"):
            await request(parse_url(vllm.url), "GET", "/slow", 0.05)
    with pytest.raises(NotSentError):
        await request(parse_url(vllm.url), "GET", "/", 2.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"x" * 200_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    ],
)
async def test_what_is_not_http_is_said_to_be_so_within_bounds(raw: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        with pytest.raises(NotHttpError):
            await request(target, "GET", "/", 2.0)


async def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch):
    """They capture loopback."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    vllm = FakeVllm()
    async with vllm:
        assert (await request(parse_url(vllm.url), "GET", "/health", 2.0)).status == 200


def test_a_metrics_page_of_vllm_names_every_family_that_is_read():
    assert "vllm:kv_cache_usage_perc" in metrics()
