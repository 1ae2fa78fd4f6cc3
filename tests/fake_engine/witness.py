"""What a fake engine adds to the history of a fleet under test: see `tests.robustness.history`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.robustness.history import Effect, Ended, Taken, Tape, now_ns


class Witness:
    """Belongs to the engine's thread."""

    def __init__(self, tape: Path, replica: str, audit: Path) -> None:
        """`audit` is the audit log of the sidecar beside this engine, which is looked into at each effect."""
        self._tape = Tape(tape)
        self._replica = replica
        self._audit = audit
        self._request_id = ""
        self._taken_ns = 0

    def taken(self, incarnation: str, request_id: str, at_ns: int) -> None:
        """A request was taken up; `at_ns` is the instant that is compared with its deadline."""
        self._request_id, self._taken_ns = request_id, at_ns
        self._tape.write(
            Taken(at_ns=at_ns, replica=self._replica, incarnation=incarnation, request_id=self._request_id)
        )

    def effect(self, incarnation: str, effect: str) -> None:
        """Something has changed."""
        self._tape.write(
            Effect(
                at_ns=now_ns(),
                replica=self._replica,
                incarnation=incarnation,
                request_id=self._request_id,
                effect=effect,
                taken_ns=self._taken_ns,
                audited=self._is_audited(),
            )
        )

    def ended(self, incarnation: str) -> None:
        """What was taken up is about to be answered."""
        self._tape.write(
            Ended(at_ns=now_ns(), replica=self._replica, incarnation=incarnation, request_id=self._request_id)
        )

    def _is_audited(self) -> bool:
        """Newest first: the line must be there now, whenever it claims to have been written."""
        if not self._audit.exists():
            return False
        for line in reversed(self._audit.read_text().splitlines()):
            if self._request_id in line and json.loads(line)["audit"] == "begin":
                return True
        return False
