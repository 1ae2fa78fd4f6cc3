"""What became of the last operations on one engine, by request id: a ring, so that it never grows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from engine_bridge import protocol

RECORDED_OUTCOMES: Final = 1024
"""An id that fell out of the ring is a new one."""


def fingerprint(request: protocol.Mutation) -> bytes:
    """The arguments of a request without the call number and the deadline: what makes two requests the same."""
    return protocol.encoder.encode(msgspec.structs.replace(request, call=0, deadline_ns=0))


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation that has ended."""

    fingerprint: bytes
    outcome: protocol.Outcome

    def again(self, call: int) -> protocol.Outcome:
        """The outcome for somebody who asks once more."""
        return msgspec.structs.replace(self.outcome, call=call, replayed=True)


class Outcomes:
    """The ring. Request ids are spelled in the one canonical way."""

    def __init__(self) -> None:
        """Empty."""
        self._ring: OrderedDict[str, Recorded] = OrderedDict()

    def find(self, request_id: str) -> Recorded | None:
        """What is on record for an id."""
        return self._ring.get(request_id)

    def put(self, request: protocol.Mutation, outcome: protocol.Outcome) -> None:
        """Record an outcome, at the cost of the oldest when the ring is full."""
        self._ring[request.request_id] = Recorded(fingerprint(request), outcome)
        if len(self._ring) > RECORDED_OUTCOMES:
            self._ring.popitem(last=False)
