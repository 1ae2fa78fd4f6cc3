"""Data parallel: every rank answers for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engine_contract import reset_result
from tests.engine.conftest import engine_process

pytestmark = pytest.mark.engine


def test_with_one_busy_rank_fail_is_refused_there_and_done_on_the_other(engine_dir: Path) -> None:
    with (
        engine_process(engine_dir, ranks=2, data_parallel_size=2, step_ms=2, max_model_len=8192, blocks=1024) as engine,
        engine.bridge(0) as first,
        engine.bridge(1) as second,
    ):
        welcomes = [first.welcome, second.welcome]
        assert [welcome.data_parallel_rank for welcome in welcomes if welcome] == [0, 1]
        # The one that attached last knows both; the other may have looked before its neighbour had a name.
        assert [0, 1] in [welcome.local_ranks for welcome in welcomes if welcome]
        assert len({welcome.incarnation for welcome in welcomes if welcome}) == 2
        busy = engine.add(list(range(8, 72)), 5000, rank=0)
        engine.wait_tokens(busy, 1)
        outcomes = [first.reset("fail"), second.reset("fail")]
        assert [outcome.state for outcome in outcomes] == ["refused", "done"]
        assert reset_result(outcomes[0]).holders.running_requests == 1
        assert reset_result(outcomes[1]).holders.running_requests == 0
        engine.client.abort_requests([busy])
