"""One mutation of a replica, while it runs and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.backends.engine import Submitted
from sidecar.replica.aggregate import EngineAnswer, Folded
from sidecar.replica.requests import Wanted
from sidecar.rpc.auth import Caller
from sidecar.rpc.deadlines import Deadline


@dataclass(slots=True)
class Operation:
    """One mutation and what became of it."""

    wanted: Wanted
    started_at: float
    """Wall clock, for people."""
    caller: Caller
    peer: str
    answers: dict[str, EngineAnswer] = field(default_factory=dict)
    """By engine key."""
    folded: Folded | None = None
    task: asyncio.Task[None] | None = None
    asked: Sequence[asyncio.Task[Submitted]] = ()
    """One an engine, in the order of the engines asked last."""
    deadline: Deadline = field(default_factory=lambda: Deadline(0))
    """After this no engine begins it."""

    def conclude(self) -> None:
        """Wait no longer for the engines that have not answered: what is known of them now goes on record."""
        for task in self.asked:
            task.cancel()

    @property
    def running(self) -> bool:
        """Whether it is under way now."""
        return self.task is not None and not self.task.done()

    @property
    def settled(self) -> bool:
        """Whether every engine said what happened."""
        return self.folded is not None and all(answer.settled for answer in self.answers.values())
