"""What the table of versions says of a vLLM is what a bridge says that is attached to it."""

from __future__ import annotations

import pytest

from engine_bridge import protocol

pytestmark = pytest.mark.engine


def test_every_operation_is_found_on_the_vllm_that_the_product_is_built_for() -> None:
    from tests.compat.probe import capabilities

    assert capabilities() == dict.fromkeys(protocol.CAPABILITIES, "")
