"""Before scheduling is resumed: which engines stand still because a weight update was abandoned half way.

An engine that resumes then serves whatever bytes were written. The person who resumes may know that the weights are
whole by now; kvctl cannot, so it says what it sees and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.cli import output
from sidecar.client.reach import Reach

READ_TIMEOUT_S: Final = 5.0
TOLD_BY: Final = "weight update was abandoned"
"""What a sidecar's explanation of the verdict PAUSED says then."""


async def warn(reach: Reach, targets: fleet_pb2.Targets, *, dry_run: bool) -> None:
    """A warning on stderr for each such engine."""
    would = "would serve" if dry_run else "will serve"
    for where in found(await reach.admission(targets, READ_TIMEOUT_S)):
        output.note(
            f"warning: {where}: its weight update was abandoned; the weights may be half written, and it {would} them "
            "as they are"
        )


def found(fleet: fleet_pb2.FleetAdmissionResponse) -> Iterator[str]:
    """Replica and engine."""
    for replica in fleet.replicas:
        for engine in replica.admission.engines:
            if engine.verdict == types_pb2.VERDICT_PAUSED and TOLD_BY in engine.explanation:
                yield f"{replica.replica} engine {engine.engine.data_parallel_rank}"
