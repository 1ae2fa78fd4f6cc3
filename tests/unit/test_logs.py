"""What a collector of logs reads: one JSON object a line, with numbers where the code wrote numbers."""

from __future__ import annotations

import json
import logging

import pytest

from sidecar.rpc.logs import JsonFormatter


def written(message: str, *values: object) -> dict[str, object]:
    record = logging.LogRecord("kvctl", logging.INFO, __file__, 1, message, values, None)
    fields = json.loads(JsonFormatter().format(record))
    assert isinstance(fields, dict)
    return fields


def test_what_the_code_writes_as_a_number_is_one_and_what_only_looks_like_one_is_a_text() -> None:
    fields = written("serving name=%s pid=%d took_ms=%.1f version=%s text=%r", "42", 77, 0.25, "1.5", "a b")
    assert fields["msg"] == "serving"
    assert {key: fields[key] for key in ("name", "pid", "took_ms", "version", "text")} == {
        "name": "42", "pid": 77, "took_ms": 0.2, "version": "1.5", "text": "a b",
    }  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_has_no_number_for_stays_a_text(value: float) -> None:
    assert written("slept seconds=%f", value)["seconds"] == f"{value:f}"


def test_a_text_of_others_that_looks_like_a_pair_breaks_no_line() -> None:
    assert written("engine said %s pid=%d", "pid=0x7", 77)["pid"] == "0x7"
