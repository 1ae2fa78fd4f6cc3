"""Ours over a method of somebody's object, among other plugins that do the same and have other manners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_bridge.engine.in_force import MOST_LAYERS, Layer


class Vllm:
    """Its method says who was called, from the outside in."""

    def method(self, *names: str) -> list[str]:
        return [*names, "vllm"]


def ours(beneath: Callable[..., Any], *names: str) -> Any:
    return beneath(*names, "ours")


def wrap(owner: Any, name: str) -> None:
    """What a well-behaved plugin does."""
    beneath = owner.method
    owner.method = lambda *names: beneath(*names, name)


@pytest.fixture
def owner() -> Vllm:
    return Vllm()


def test_ours_is_called_first_and_can_be_taken_out_without_a_trace(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    layer.lay()
    layer.lay()
    assert layer.on_top
    assert owner.method() == ["ours", "vllm"]
    layer.lift()
    layer.lift()
    assert vars(owner) == {}
    assert not layer.on_top


def test_what_others_laid_before_us_comes_back(owner: Vllm) -> None:
    wrap(owner, "theirs")
    before = vars(owner)["method"]
    layer = Layer(owner, "method", ours)
    layer.lay()
    assert owner.method() == ["ours", "theirs", "vllm"]
    layer.lift()
    assert vars(owner)["method"] is before


def test_what_others_laid_over_ours_stays_and_ours_is_silent_beneath_it(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    layer.lay()
    wrap(owner, "theirs")
    assert not layer.on_top
    layer.lift()
    assert owner.method() == ["theirs", "vllm"]


def test_ours_on_top_once_more_is_done_once(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    layer.lay()
    wrap(owner, "theirs")
    layer.lay()
    assert owner.method() == ["ours", "theirs", "vllm"]
    layer.lift()
    assert owner.method() == ["theirs", "vllm"]


def test_ours_taken_away_by_others_is_laid_again(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    layer.lay()
    for _ in range(10 * MOST_LAYERS):
        del owner.method
        assert not layer.on_top
        layer.lay()
        assert owner.method() == ["ours", "vllm"]
    layer.lift()
    assert vars(owner) == {}


def test_what_others_put_back_from_our_time_is_ours_again_when_it_is_laid(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    layer.lay()
    kept = owner.method
    wrap(owner, "theirs")
    layer.lift()
    owner.method = kept  # type: ignore[method-assign]
    assert owner.method() == ["vllm"]
    layer.lay()
    assert owner.method() == ["ours", "vllm"]
    layer.lift()
    assert vars(owner) == {}


def test_a_wrap_of_the_class_is_called_beneath_ours(monkeypatch: pytest.MonkeyPatch, owner: Vllm) -> None:
    Layer(owner, "method", ours).lay()
    original = Vllm.method
    monkeypatch.setattr(Vllm, "method", lambda self, *names: original(self, *names, "theirs"))
    assert owner.method() == ["ours", "theirs", "vllm"]


def test_two_that_insist_on_lying_on_top_come_to_an_end(owner: Vllm) -> None:
    layer = Layer(owner, "method", ours)
    for _ in range(10 * MOST_LAYERS):
        layer.lay()
        wrap(owner, "theirs")
    assert owner.method().count("ours") == 1
    assert owner.method().count("theirs") == 10 * MOST_LAYERS


def test_what_beneath_raises_comes_out_and_ours_is_in_force_the_next_time(owner: Vllm) -> None:
    def raising(beneath: Callable[..., Any], *names: str) -> Any:
        if "raise" in names:
            raise ValueError("theirs")
        return beneath(*names, "ours")

    layer = Layer(owner, "method", raising)
    layer.lay()
    with pytest.raises(ValueError, match="theirs"):
        owner.method("raise")
    assert owner.method() == ["ours", "vllm"]


def test_an_owner_that_lets_nothing_be_laid_over_it_is_named() -> None:
    class Stubborn(Vllm):
        def __setattr__(self, name: str, value: object) -> None:
            pass

    layer = Layer(Stubborn(), "method", ours)
    with pytest.raises(RuntimeError, match=r"Stubborn\.method cannot be laid over"):
        layer.lay()
    assert not layer.on_top
