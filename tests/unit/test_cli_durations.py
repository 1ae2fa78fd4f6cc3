"""Durations as a person types them."""

from __future__ import annotations

import click
import pytest

from sidecar.cli.options import Duration


@pytest.mark.parametrize("text", ["\u0661s", "\uff15s", "1.\u0665s"])
def test_digits_of_other_scripts_are_no_duration(text: str):
    with pytest.raises(click.BadParameter, match="is not a duration"):
        Duration().convert(text, None, None)


def test_ordinary_durations_are_seconds():
    assert [Duration().convert(text, None, None) for text in ("500ms", "1.5m", "20")] == [0.5, 90.0, 20.0]
