"""A call that the network held up is not begun after its caller has given up.

gRPC sends a deadline as a length of time, which begins anew when the call arrives. A call that spent 30 s in a proxy,
in a stopped container's socket or in a partition has its whole time again, and would change an engine long after its
caller was told DEADLINE_EXCEEDED. So a caller that knows its server sends two more words in the metadata: the server
process that is meant, and the instant of that process's own monotonic clock after which the call must not begin. Both
come from an earlier answer: every answer carries the process's id and its clock in the trailing metadata. Monotonic
clocks of two machines have nothing in common but their pace, and a restarted process may count from elsewhere, so an
instant without the process it belongs to means nothing: a call for another process is refused with a reason of its
own, before anything happens, and its caller may ask anew.

Where in the round trip the clock was read is not known. The caller takes it as read at the end, which errs to the safe
side by one round trip at most. Callers that send neither are served as ever.
"""

from __future__ import annotations

import contextvars
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from sidecar.rpc.errors import Violation, failure

INSTANCE_KEY: Final = "kvctl-instance"
"""Request: the server process that is meant. Answer: the one that answered. 32 hex digits."""
NOT_AFTER_KEY: Final = "kvctl-not-after-ns"
"""Request: the instant of that process's monotonic clock after which the call must not begin, nanoseconds."""
CLOCK_KEY: Final = "kvctl-clock-ns"
"""Answer: the process's monotonic clock as it answered, nanoseconds."""

Metadata = Sequence[tuple[str, str | bytes]]

_PACE: Final = 5e-4
"""How far the paces of two monotonic clocks may differ: adjtimex slews by 500 ppm at most."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One server process."""

    id: str

    @classmethod
    def new(cls) -> Instance:
        """A fresh one, at the start of a process."""
        return cls(uuid.uuid4().hex)

    def trailing(self) -> tuple[tuple[str, str], ...]:
        """What an answer tells of this process, now."""
        return ((INSTANCE_KEY, self.id), (CLOCK_KEY, str(time.monotonic_ns())))

    def check(self, method: str, metadata: Metadata) -> int | None:
        """The instant after which the call must not begin, None without one.

        Failure OTHER_INSTANCE when another process is meant, NOT_EXECUTED when the instant has passed, INVALID_FIELD
        when it is no number. Nothing has happened then.
        """
        meant = _one(metadata, INSTANCE_KEY)
        if meant and meant != self.id:
            raise failure(
                grpc.StatusCode.UNAVAILABLE,
                "OTHER_INSTANCE",
                f"{method} was meant for another process than this one ({meant[:8]}, this is {self.id[:8]}): it was "
                "restarted, or the address is another replica's now. Nothing was done; ask who is here and call again",
                metadata={"instance": self.id, "meant": meant[:64]},
                retry_after=0.0,
            )
        text = _one(metadata, NOT_AFTER_KEY)
        if not text:
            return None
        if not meant or not (text.isascii() and text.isdigit() and len(text) <= 19):
            wrong = f"must be nanoseconds of this server's clock and come with {INSTANCE_KEY}, found {text[:80]!r}"
            raise failure(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"metadata {NOT_AFTER_KEY} {wrong}",
                metadata={"field": NOT_AFTER_KEY},
                violations=[Violation(NOT_AFTER_KEY, wrong)],
            )
        late_ns = time.monotonic_ns() - int(text)
        if late_ns >= 0:
            raise failure(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "NOT_EXECUTED",
                f"{method} arrived {late_ns / 1e9:.3f} s after its caller's deadline and was not begun",
                metadata={"execution": "NOT_EXECUTED"},
            )
        return int(text)


NOT_AFTER_NS: Final[contextvars.ContextVar[int | None]] = contextvars.ContextVar("not_after_ns", default=None)
"""The instant of the running call, CLOCK_MONOTONIC; None without one."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a caller knows of a server process from one of its answers."""

    instance: str
    clock_ns: int
    """The server's clock in that answer."""
    sent_ns: int
    """This process's clock when the question went out."""
    heard_ns: int
    """And when the answer was here."""

    def metadata(self, deadline_ns: int) -> tuple[tuple[str, str], ...]:
        """What a call carries that must not begin after an instant of this process's clock."""
        not_after = self.clock_ns + deadline_ns - self.heard_ns
        return ((INSTANCE_KEY, self.instance), (NOT_AFTER_KEY, str(max(0, not_after))))

    def doubt_ns(self, now_ns: int) -> int:
        """How much too early an instant may be taken, and how far the clocks may have drifted since."""
        return self.heard_ns - self.sent_ns + int((now_ns - self.heard_ns) * _PACE)

    def or_better(self, other: Known) -> Known:
        """The one to go by from now on: the other when it tells of another process, or tells the clock better."""
        now_ns = max(self.heard_ns, other.heard_ns)
        if other.instance == self.instance and self.doubt_ns(now_ns) < other.doubt_ns(now_ns):
            return self
        return other


def learn(trailing: Iterable[tuple[str, str | bytes]], sent_ns: int, heard_ns: int) -> Known | None:
    """What an answer's trailing metadata tells of its server; None from a server that does not say."""
    found = [(key, value) for key, value in trailing if key in (INSTANCE_KEY, CLOCK_KEY)]
    instance, clock = _one(found, INSTANCE_KEY), _one(found, CLOCK_KEY)
    if not instance or not (clock.isascii() and clock.isdigit()):
        return None
    return Known(instance, int(clock), sent_ns, heard_ns)


def _one(metadata: Metadata, wanted: str) -> str:
    for key, value in metadata:
        if key == wanted and isinstance(value, str):
            return value
    return ""
