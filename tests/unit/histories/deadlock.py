"""Two histories that many tests of verdicts begin with."""

from __future__ import annotations

from sidecar.replica.history import SECOND
from tests.unit.histories.tape import Tape, evidence, head, holder

DEADLOCK = evidence(
    waiting=2,
    load_finished=2,
    waiting_holding_blocks=2,
    blocks_free=27,
    head=head(32, "WAITING_FOR_REMOTE_KVS", 66),
    holders=[holder(67, "a"), holder(66, "b")],
    oldest_waiting_ns=3 * SECOND,
)


def serving(**changes: int) -> Tape:
    """An engine that has served for 20 seconds."""
    tape = Tape()
    tape.play(2)
    tape.play(20, tokens=1500, outputs=1500, running=29, waiting=4, blocks_free=60, **changes)
    return tape


def deadlocked() -> Tape:
    tape = serving()
    tape.play(30, evidence=DEADLOCK, running=0, waiting=2, deferred=2, holding=2, blocks_free=27)
    return tape
