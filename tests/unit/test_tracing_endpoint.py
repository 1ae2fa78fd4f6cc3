"""The address of a collector is looked at before anything is served."""

from __future__ import annotations

import pytest

from sidecar.rpc.tracing import check_endpoint

NAME = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    "value", ["http://collector:4317", "https://[::1]:4317/v1", "collector:4317", "collector", "http://10.0.0.1"]
)
def test_what_the_exporter_takes_is_an_address(value: str) -> None:
    check_endpoint(NAME, value)


@pytest.mark.parametrize("value", ["http://[::1", "::bad::", "   ", "http://", "http://collector:port", "c:70000"])
def test_what_is_no_address_is_named_with_its_variable_and_what_was_expected(value: str) -> None:
    with pytest.raises(ValueError, match="expected one such as http://collector:4317") as caught:
        check_endpoint(NAME, value)
    assert str(caught.value).startswith(f"{NAME} is {value!r}")
