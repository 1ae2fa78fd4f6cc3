"""A reset of stock vLLM over HTTP: every reply shape of vLLM 0.12 to 0.33, read for what it is."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Unreachable
from tests.contract.fake_vllm_http import Answer, FakeVllm, metrics
from tests.contract.http_engines import engines, first, outcome, reset, soon, tiers

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


@pytest.mark.parametrize("hits", [0, 900], ids=["none of them hit", "nearly all of them hit"])
@pytest.mark.parametrize(
    ("said", "state"), [("", "partial"), ('{"success":true}', "done"), ('{"success":false}', "refused")]
)
async def test_whether_a_reset_worked_is_never_read_from_a_hit_rate(hits: int, said: str, state: str):
    """vllm#25780: a preempted request that finds its own blocks counts as a hit."""
    vllm = FakeVllm().dev(Answer(body=said))
    rate = f"vllm:prefix_cache_queries_total 1000\nvllm:prefix_cache_hits_total {hits}\n"
    vllm.routes["GET /metrics"] = Answer(body=metrics(running=2) + rate, content_type="text/plain")
    assert (await outcome(vllm, reset())).state == state


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
