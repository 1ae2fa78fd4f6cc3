"""A pause of all ranks or of none.

A replica of which one rank is paused and another is not serves nobody and updates no weights, and when the lease of the
paused one ends nobody has a reason to resume it. So when a pause did not reach every rank, the ranks that took it are
resumed at once, and their results say so.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from engine_bridge import protocol
from sidecar.backends.engine import Answered, EngineBackend, Lost, Submitted
from sidecar.replica.aggregate import EngineAnswer
from sidecar.rpc.deadlines import Deadline

UNDO_S: Final = 5.0
"""Time for the ranks to resume, after the caller's own deadline if need be."""

LAST_UNDO_S: Final = 1.0
"""The same when this sidecar is about to end; the lease ends what is then left."""


def may_be_paused(answer: EngineAnswer) -> bool:
    """Whether this rank took the pause, as far as is known."""
    submitted = answer.submitted
    if isinstance(submitted, Lost):
        return submitted.execution == "unknown"
    return isinstance(submitted, Answered) and submitted.outcome.state == "done"


async def undo(
    request_id: str, answers: Mapping[str, EngineAnswer], engines: Mapping[str, EngineBackend], within_s: float
) -> dict[str, EngineAnswer]:
    """Resume the ranks that are paused, within so many seconds; their answers as they are now, by engine key."""
    keys = [key for key, answer in answers.items() if may_be_paused(answer) and key in engines]
    resume_id = str(uuid.uuid5(uuid.UUID(request_id), "undo"))
    resume = protocol.Resume(0, resume_id, 0, pause_request_id=request_id)
    deadline_ns = Deadline.after(within_s).at_ns
    resumed = await asyncio.gather(*(engines[key].submit(resume, deadline_ns) for key in keys))
    return {
        key: replace(answers[key], submitted=_undone(request_id, answers[key], submitted))
        for key, submitted in zip(keys, resumed, strict=True)
    }


def _undone(request_id: str, answer: EngineAnswer, resumed: Submitted) -> Submitted:
    if not isinstance(answer.submitted, Answered):
        return answer.submitted  # still not known: asked again by request id
    if not isinstance(resumed, Answered) or resumed.outcome.state != "done":
        message = (
            f"engine {answer.rank} was paused and could not be resumed after another rank had failed; resume it by "
            f"hand, or its lease ends the pause of {request_id}"
        )
        outcome = protocol.Outcome(0, request_id, "pause", "refused", "WRONG_SCHEDULING_STATE", message)
        return Answered(outcome)
    message = f"engine {answer.rank} was paused, and resumed again because another rank could not be paused"
    return Answered(protocol.Outcome(0, request_id, "pause", "withdrawn", "CANCELLED", message, resumed.outcome.result))
