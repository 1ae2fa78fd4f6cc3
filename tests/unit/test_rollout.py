"""The order of a rollout: examples a person can check, then everything against a simple model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.rollout import Ending, Policy, PolicyError, Progress, Rollout


def names(count: int) -> list[str]:
    return [f"r{index}" for index in range(count)]


def rolling(**numbers: float) -> Policy:
    return Policy(rolling=True, **numbers)  # type: ignore[arg-type]


# --- resolving what was asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "targets", "expected"),
    [("25%", 10, 2), ("25%", 3, 1), ("1%", 50, 1), ("100%", 7, 7), ("2", 100, 2), ("", 100, 1), (" 3 ", 9, 3)],
)
def test_max_unavailable_is_a_count_or_a_share_rounded_down_to_at_least_one(
    text: str, targets: int, expected: int
) -> None:
    asked = fleet_pb2.Rollout(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING, max_unavailable=text)
    assert Policy.resolve(asked, targets).max_unavailable == expected


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-1", "a", "1.5", "٣", "2 %%"])
def test_a_max_unavailable_that_means_nothing_is_refused_by_name(text: str) -> None:
    asked = fleet_pb2.Rollout(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING, max_unavailable=text)
    with pytest.raises(PolicyError, match="expected a count") as refused:
        Policy.resolve(asked, 4)
    assert refused.value.field == "max_unavailable"
    assert "a count of at least 1" in str(refused.value)
    assert "1% to 100%" in str(refused.value)


@pytest.mark.parametrize("field", ["max_unavailable", "canary", "min_healthy_time"])
def test_wave_options_without_waves_are_refused_rather_than_dropped(field: str) -> None:
    asked = fleet_pb2.Rollout()
    if field == "min_healthy_time":
        asked.min_healthy_time.seconds = 5
    else:
        setattr(asked, field, "2" if field == "max_unavailable" else 2)
    with pytest.raises(PolicyError) as refused:
        Policy.resolve(asked, 4)
    assert refused.value.field == field
    assert refused.value.combination


@pytest.mark.parametrize("field", ["canary", "max_failures", "concurrency"])
def test_negative_numbers_are_refused(field: str) -> None:
    asked = fleet_pb2.Rollout(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING)
    setattr(asked, field, -1)
    with pytest.raises(PolicyError) as refused:
        Policy.resolve(asked, 4)
    assert refused.value.field == field


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(PolicyError, match="strategy 9 is unknown"):
        Policy.resolve(fleet_pb2.Rollout(strategy=9), 4)  # type: ignore[arg-type]


def test_rolling_stops_at_the_first_failure_unless_told_otherwise() -> None:
    asked = fleet_pb2.Rollout(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING)
    assert Policy.resolve(asked, 4).max_failures == 1
    assert Policy.resolve(fleet_pb2.Rollout(), 4).max_failures == 0


# --- all at once -------------------------------------------------------------------------------------------------


def test_all_at_once_starts_everything_within_the_concurrency() -> None:
    rollout = Rollout(Policy(concurrency=3), names(5), 0.0)
    assert rollout.decide(0.0).start == ("r0", "r1", "r2")
    assert rollout.decide(0.0).start == ()
    rollout.finish("r1", succeeded=False, now=1.0)
    assert rollout.decide(1.0).start == ("r3",)


def test_all_at_once_never_looks_at_health() -> None:
    rollout = Rollout(Policy(), names(2), 0.0)
    rollout.decide(0.0)
    rollout.finish("r0", succeeded=True, now=1.0)
    rollout.finish("r1", succeeded=True, now=1.0)
    ended = rollout.decide(1.0)
    assert ended.finished
    assert ended.look == ()


def test_no_target_at_all_is_finished_at_once() -> None:
    assert Rollout(Policy(), [], 0.0).decide(0.0).finished
    assert Rollout(rolling(), [], 0.0).decide(0.0).finished


# --- waves -------------------------------------------------------------------------------------------------------


def test_the_next_wave_waits_until_the_last_was_healthy_long_enough() -> None:
    rollout = Rollout(rolling(max_unavailable=2, min_healthy_s=10.0, look_every_s=1.0), names(4), 0.0)
    assert rollout.decide(0.0).start == ("r0", "r1")
    rollout.finish("r0", succeeded=True, now=1.0)
    assert rollout.decide(1.0).look == ()
    rollout.finish("r1", succeeded=True, now=2.0)
    assert rollout.decide(2.0).look == ("r0", "r1")
    rollout.observe("r0", healthy=True, now=2.0)
    rollout.observe("r1", healthy=True, now=2.0)
    later = rollout.decide(2.0)
    assert later.start == ()
    assert later.wake_at == 3.0
    assert rollout.decide(12.0).look == ("r0", "r1")
    rollout.observe("r0", healthy=True, now=12.0)
    assert rollout.decide(12.0).start == ()
    rollout.observe("r1", healthy=True, now=12.0)
    wave = rollout.decide(12.0)
    assert wave.start == ("r2", "r3")
    assert wave.wave == 1


def test_a_target_that_falls_ill_while_watched_starts_its_healthy_time_again() -> None:
    rollout = Rollout(rolling(min_healthy_s=2.0, look_every_s=1.0), names(2), 0.0)
    rollout.decide(0.0)
    rollout.finish("r0", succeeded=True, now=0.0)
    for now, healthy in [(0.0, True), (1.0, False), (2.0, True), (3.0, True)]:
        assert rollout.decide(now).look == ("r0",)
        rollout.observe("r0", healthy=healthy, now=now)
    assert rollout.decide(4.0).look == ("r0",)
    rollout.observe("r0", healthy=True, now=4.0)
    assert rollout.decide(4.0).start == ("r1",)


def test_the_canary_goes_alone_before_wider_waves() -> None:
    rollout = Rollout(rolling(max_unavailable=3, canary=1), names(6), 0.0)
    first = rollout.decide(0.0)
    assert first.start == ("r0",)
    rollout.finish("r0", succeeded=True, now=0.0)
    assert rollout.decide(0.0).look == ("r0",)
    rollout.observe("r0", healthy=True, now=0.0)
    assert rollout.decide(0.0).start == ("r1", "r2", "r3")


def test_a_target_that_is_gone_by_its_turn_counts_neither_way() -> None:
    rollout = Rollout(rolling(max_unavailable=1, max_failures=1), names(3), 0.0)
    assert rollout.decide(0.0).start == ("r0",)
    rollout.leave_out("r0")
    assert rollout.disrupted == set()
    assert rollout.decide(0.0).start == ("r1",)
    rollout.finish("r1", succeeded=False, now=0.0)
    assert [drop.target for drop in rollout.decide(0.0).drop] == ["r2"]


def test_a_canary_that_is_gone_is_followed_by_another_canary_and_not_by_a_wide_wave() -> None:
    rollout = Rollout(rolling(max_unavailable=3, canary=1), names(6), 0.0)
    assert rollout.decide(0.0).start == ("r0",)
    rollout.leave_out("r0")
    assert rollout.decide(0.0).start == ("r1",)
    rollout.finish("r1", succeeded=True, now=0.0)
    assert rollout.decide(0.0).look == ("r1",)
    rollout.observe("r1", healthy=True, now=0.0)
    assert rollout.decide(0.0).start == ("r2", "r3", "r4")
    rollout.leave_out("r2")
    rollout.leave_out("r3")
    rollout.leave_out("r4")
    assert rollout.decide(0.0).start == ("r5",)


def test_only_a_target_that_is_under_way_can_be_left_out() -> None:
    with pytest.raises(ValueError, match="not under way"):
        Rollout(rolling(), names(1), 0.0).leave_out("r0")


def test_a_canary_wider_than_max_unavailable_takes_several_waves() -> None:
    rollout = Rollout(rolling(max_unavailable=2, canary=3), names(6), 0.0)
    sizes = []
    for _ in range(3):
        started = rollout.decide(0.0).start
        sizes.append(len(started))
        for name in started:
            rollout.finish(name, succeeded=True, now=0.0)
        for name in rollout.decide(0.0).look:
            rollout.observe(name, healthy=True, now=0.0)
    assert sizes == [2, 1, 2]


def test_a_stalled_target_stops_the_rollout_and_is_named() -> None:
    rollout = Rollout(rolling(settle_s=30.0, look_every_s=10.0), names(3), 0.0)
    rollout.decide(0.0)
    rollout.finish("r0", succeeded=True, now=0.0)
    now = 0.0
    while not (decision := rollout.decide(now)).drop:
        for name in decision.look:
            rollout.observe(name, healthy=False, now=now, why="HELD_BLOCKS_DEADLOCK")
        now += 5.0
        assert now < 100.0
    assert [drop.target for drop in decision.drop] == ["r1", "r2"]
    assert all(drop.ending is Ending.STOPPED for drop in decision.drop)
    assert "r0" in decision.drop[0].why
    assert "HELD_BLOCKS_DEADLOCK" in decision.drop[0].why
    assert decision.finished


def test_an_unhealthy_target_keeps_its_place_among_the_disrupted() -> None:
    rollout = Rollout(rolling(max_unavailable=2, max_failures=5, settle_s=1.0), names(6), 0.0)
    rollout.decide(0.0)
    rollout.finish("r0", succeeded=True, now=0.0)
    rollout.finish("r1", succeeded=True, now=0.0)
    rollout.decide(0.0)
    rollout.observe("r0", healthy=False, now=0.0)
    rollout.observe("r1", healthy=True, now=0.0)
    assert rollout.decide(2.0).start == ("r2",)
    assert rollout.disrupted == {"r0", "r2"}


def test_the_last_wave_is_not_watched() -> None:
    rollout = Rollout(rolling(min_healthy_s=60.0), names(1), 0.0)
    rollout.decide(0.0)
    rollout.finish("r0", succeeded=True, now=1.0)
    assert rollout.decide(1.0).finished


# --- hold, cancel, failures --------------------------------------------------------------------------------------


def test_held_starts_nothing_and_says_so() -> None:
    rollout = Rollout(rolling(), names(2), 0.0)
    rollout.hold()
    assert rollout.decide(0.0).held
    rollout.release()
    assert rollout.decide(0.0).start == ("r0",)


def test_cancel_ends_what_was_not_started_and_waits_for_what_was() -> None:
    rollout = Rollout(Policy(concurrency=1), names(3), 0.0)
    rollout.decide(0.0)
    rollout.cancel()
    decision = rollout.decide(0.0)
    assert [(drop.target, drop.ending) for drop in decision.drop] == [
        ("r1", Ending.CANCELLED),
        ("r2", Ending.CANCELLED),
    ]
    assert not decision.finished
    rollout.finish("r0", succeeded=True, now=5.0)
    assert rollout.decide(5.0).finished


def test_cancel_works_while_held() -> None:
    rollout = Rollout(rolling(), names(2), 0.0)
    rollout.hold()
    rollout.cancel()
    assert rollout.decide(0.0).finished


def test_the_failure_limit_drops_the_rest_with_the_last_failure_as_reason() -> None:
    rollout = Rollout(Policy(concurrency=1, max_failures=2), names(4), 0.0)
    for name in ("r0", "r1"):
        assert rollout.decide(0.0).start == (name,)
        rollout.finish(name, succeeded=False, now=0.0, why="blocks are held")
    decision = rollout.decide(0.0)
    assert [drop.target for drop in decision.drop] == ["r2", "r3"]
    assert "r1: blocks are held" in decision.drop[0].why


# --- after a crash -----------------------------------------------------------------------------------------------


def test_after_a_crash_the_last_wave_is_finished_and_watched_before_the_next() -> None:
    progress = {"r0": Progress(0, True), "r1": Progress(1, True), "r2": Progress(1, None)}
    rollout = Rollout(rolling(max_unavailable=2), names(5), 100.0, progress)
    assert rollout.decide(100.0).start == ()
    rollout.finish("r2", succeeded=True, now=101.0)
    assert rollout.decide(101.0).look == ("r1", "r2")
    rollout.observe("r1", healthy=True, now=101.0)
    rollout.observe("r2", healthy=True, now=101.0)
    assert rollout.decide(101.0).start == ("r3", "r4")


def test_after_a_crash_earlier_failures_still_count() -> None:
    rollout = Rollout(rolling(max_failures=1), names(3), 0.0, {"r0": Progress(0, False)})
    assert {drop.target for drop in rollout.decide(0.0).drop} == {"r1", "r2"}


def test_after_a_crash_an_unhealthy_target_still_takes_a_place() -> None:
    rollout = Rollout(rolling(max_unavailable=1, max_failures=9), names(3), 0.0, {"r0": Progress(0, True, "stalled")})
    assert "r0 stalled" in rollout.decide(0.0).drop[0].why


# --- everything, against a model ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 14),
    is_rolling=st.booleans(),
    max_unavailable=st.integers(1, 5),
    canary=st.integers(0, 4),
    min_healthy=st.sampled_from([0.0, 3.0]),
    max_failures=st.integers(0, 4),
    concurrency=st.integers(1, 6),
    failing=st.floats(0, 0.6),
    ill=st.floats(0, 0.6),
    gone=st.floats(0, 0.6),
    cancel_at=st.none() | st.floats(0, 120),
    hold_at=st.none() | st.floats(0, 60),
    crash_at=st.none() | st.floats(0, 120),
    seed=st.integers(0, 2**32),
)
def test_every_rollout_keeps_its_promises(
    count: int,
    is_rolling: bool,
    max_unavailable: int,
    canary: int,
    min_healthy: float,
    max_failures: int,
    concurrency: int,
    failing: float,
    ill: float,
    gone: float,
    cancel_at: float | None,
    hold_at: float | None,
    crash_at: float | None,
    seed: int,
) -> None:
    """The model: a set under way, a set waiting for a good look, a set found ill, and what has ended."""
    dice = random.Random(seed)
    policy = Policy(
        rolling=is_rolling,
        max_unavailable=max_unavailable,
        canary=canary if is_rolling else 0,
        min_healthy_s=min_healthy,
        max_failures=max_failures,
        concurrency=concurrency,
        settle_s=10.0,
        look_every_s=1.0,
    )
    targets = names(count)
    rollout = Rollout(policy, targets, 0.0)
    now = 0.0
    under_way: dict[str, float] = {}
    looking: dict[str, float] = {}
    waves: dict[str, int] = {}
    ended: dict[str, object] = {}
    failures = 0
    cancelled = False
    held = False
    for _ in range(2000):
        if crash_at is not None and now >= crash_at:
            crash_at = None
            progress = {
                name: Progress(
                    waves[name], None if name in under_way else ended[name] is True, rollout.unhealthy.get(name, "")
                )
                for name in waves
            }
            rollout = Rollout(policy, [name for name in targets if name in waves or name not in ended], now, progress)
            looking.clear()
            if cancelled:
                rollout.cancel()
            if held:
                rollout.hold()
        if cancel_at is not None and now >= cancel_at and not cancelled:
            cancelled = True
            rollout.cancel()
        if hold_at is not None and now >= hold_at:
            held = not held
            hold_at = now + 7.0 if held else None
            if held:
                rollout.hold()
            else:
                rollout.release()
        decision = rollout.decide(now)
        for drop in decision.drop:
            assert drop.target not in ended
            assert drop.target not in waves
            assert drop.why
            ended[drop.target] = drop.ending
        for name in decision.start:
            assert name not in waves, "started twice"
            assert name not in ended, "started after its end"
            assert not cancelled, "started after a cancel"
            assert not held, "started while held"
            assert not policy.max_failures or failures < policy.max_failures, "started after the failure limit"
            waves[name] = decision.wave
            under_way[name] = now + dice.uniform(0.1, 5.0)
        assert len(under_way) <= concurrency
        if is_rolling:
            assert len(rollout.disrupted) <= max_unavailable, "too many disrupted"
            assert set(under_way) <= rollout.disrupted
        for name in decision.look:
            assert ended[name] is True
            looking[name] = now + dice.uniform(0.0, 0.5)
        if decision.finished:
            break
        events = [*under_way.values(), *looking.values()]
        events += [
            at for at in (decision.wake_at, cancel_at if not cancelled else None, hold_at, crash_at) if at is not None
        ]
        assert events, "nothing will ever happen again"
        now = max(now, min(events))
        for name in [name for name, at in looking.items() if at <= now]:
            del looking[name]
            rollout.observe(name, healthy=dice.random() >= ill, now=now, why="stalled")
        for name in [name for name, at in under_way.items() if at <= now]:
            del under_way[name]
            if dice.random() < gone:
                del waves[name]
                ended[name] = "gone"
                rollout.leave_out(name)
                continue
            succeeded = dice.random() >= failing
            failures += not succeeded
            ended[name] = succeeded
            rollout.finish(name, succeeded=succeeded, now=now)
    else:
        pytest.fail("the rollout did not end")
    assert set(ended) == set(targets), "every target has one end"
    if not cancelled and failures == 0 and not rollout.unhealthy:
        assert all(end in (True, "gone") for end in ended.values()), "nothing was dropped without a reason"
