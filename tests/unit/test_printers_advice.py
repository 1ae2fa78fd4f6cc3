"""What to do next fits the command that was refused."""

from __future__ import annotations

import pytest
from kvctl.v1 import types_pb2

from sidecar.cli.printers.advice import advise


@pytest.mark.parametrize("reason", ["BLOCKS_HELD_BY_REQUESTS", "BLOCKS_HELD_BY_TRANSFERS", "HELD_WHILE_PAUSED"])
def test_a_refused_reorder_is_not_answered_with_options_of_reset(reason: str) -> None:
    hint = advise(reason, kind=types_pb2.OPERATION_KIND_REORDER)
    assert "--scope" in hint
    assert "--mode" not in hint
    assert "--mode" in advise(reason, kind=types_pb2.OPERATION_KIND_RESET)
