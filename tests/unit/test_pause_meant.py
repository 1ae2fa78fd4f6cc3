"""Which request id a resume names at a replica, from what the replica has on record."""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.pauses import pause_meant
from sidecar.coordinator.port import Answer, Asked
from sidecar.coordinator.targets import derive_request_id, next_request_id

PAUSE = "11111111-2222-3333-4444-555555555555"
FIRST = derive_request_id(PAUSE, "r0")
SECOND = next_request_id(FIRST)
THIRD = next_request_id(SECOND)

REFUSED = Asked(True, Answer(fleet_pb2.TargetResult(code="FAILED_PRECONDITION")))
ACCEPTED = Asked(True, Answer(fleet_pb2.TargetResult(code="OK")))
UNDER_WAY = Asked(True)
NO_ANSWER = Asked(None, Answer(fleet_pb2.TargetResult(code="UNAVAILABLE")))


@pytest.mark.parametrize(
    ("record", "meant"),
    [
        ({}, FIRST),
        ({FIRST: ACCEPTED}, FIRST),
        ({FIRST: UNDER_WAY}, FIRST),
        ({FIRST: REFUSED, SECOND: ACCEPTED}, SECOND),
        ({FIRST: REFUSED, SECOND: REFUSED, THIRD: ACCEPTED}, THIRD),
        ({FIRST: REFUSED, SECOND: UNDER_WAY}, SECOND),
        ({FIRST: REFUSED, SECOND: REFUSED}, FIRST),
        ({PAUSE: ACCEPTED}, PAUSE),
        ({FIRST: ACCEPTED, PAUSE: ACCEPTED}, FIRST),
        ({FIRST: NO_ANSWER}, FIRST),
    ],
    ids=[
        "nothing on record", "first try", "under way", "second try", "third try", "second under way", "never accepted",
        "the replica's own id", "an operation's id goes first", "no answer",
    ],
)  # fmt: skip
async def test_a_resume_names_the_try_that_the_replica_accepted(record: dict[str, Asked], meant: str) -> None:
    async def ask(request_id: str) -> Asked:
        return record.get(request_id, Asked(False))

    assert await pause_meant(PAUSE, "r0", ask) == meant
