"""What clients say to one engine in the state machine: every message, with arguments that make and that break sense."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from hypothesis import strategies as st

from engine_bridge import protocol
from tests.engine.stepped_engine import Loop
from tests.fake_engine.client import BridgeClient

HOUR_NS = 3_600 * 10**9
FOREVER = 2**63 - 1

IDS = [str(uuid.UUID(int=number)) for number in range(1, 7)]
request_ids = st.sampled_from([*IDS, IDS[0].upper(), f"urn:uuid:{IDS[1]}", "nonsense"])
offsets = st.sampled_from([HOUR_NS, HOUR_NS, HOUR_NS, FOREVER, 10**8, 10**6, 10**4, -(10**9)])
"""Of a deadline from now, ns."""
paces = st.sampled_from([1_000, 0, 400_000, 2_000_000])
"""Of the clock, ns a look; at the longest every slice ends at its first yield."""
leases = st.sampled_from([10**6, 10**9, HOUR_NS, HOUR_NS, 2**62, 2**64 - 1, -5])
running = st.sampled_from(["fail", "preempt", "keep"])
afterthoughts = st.sampled_from(["", "", "again", "again", "otherwise", "cancel", "late"])
coin = st.booleans()
rarely = st.sampled_from([False, False, False, True])
LONG = "long"
"""Stands for a text of 65,300 characters, which nobody wants to see printed."""
versions = st.sampled_from(["", "v1", "é" * 40, LONG])

resets = st.one_of(
    st.builds(protocol.Reset, st.just(0), request_ids, offsets, running, coin, rarely, rarely, coin, rarely, rarely),
    st.builds(protocol.Reset, st.just(0), request_ids, offsets, running, reorder=coin),
    st.builds(protocol.Reset, st.just(0), request_ids, offsets, st.just("fail"), wait_for_idle=st.just(True)),
    st.builds(protocol.Reset, st.just(0), request_ids, offsets, st.just("keep"), quarantine=coin, reorder=coin),
)
smaller = st.one_of(
    st.builds(protocol.Reorder, st.just(0), request_ids, offsets, st.sampled_from(["idle", "uncached", "all_free"])),
    st.builds(protocol.Relieve, st.just(0), request_ids, offsets),
)
pauses = st.one_of(
    st.builds(protocol.Pause, st.just(0), request_ids, offsets, leases, coin),
    st.builds(protocol.Resume, st.just(0), request_ids, offsets, st.sampled_from(["", *IDS[:3]]), versions, rarely),
)
mutations = resets | smaller | pauses
questions = st.one_of(
    st.builds(protocol.Renew, st.just(0), request_ids, leases, coin),
    st.builds(protocol.Admission, st.just(0), st.sampled_from([0, 1, 4096, -1, 2**63])),
    st.builds(protocol.Lookup, st.just(0), request_ids),
    st.builds(protocol.Cancel, st.just(0), request_ids),
    st.builds(protocol.Ping, st.just(0)),
)


class Caller(BridgeClient):
    """A client that never waits. It knows what it asked and has not been told."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.socket, hello=False)
        self.sock.setblocking(False)
        self.open: dict[int, protocol.Request] = {}
        self.nonsense = 0
        self.send(protocol.Hello(1, 1, "state-machine"))

    def say(self, request: Any) -> None:
        self._calls += 1
        self.open[self._calls] = msgspec.structs.replace(request, call=self._calls)
        try:
            self.send(self.open[self._calls])
        except BlockingIOError:  # the engine has not been round its loop for long: this was never said
            del self.open[self._calls]

    def hear(self) -> list[protocol.Reply]:
        found: list[protocol.Reply] = []
        while True:
            try:
                found.append(self.read())
            except BlockingIOError:
                return found


def ask(loop: Loop, caller: Caller, request: protocol.Request, said: list[int]) -> Any:
    """The answer, after as many turns of the loop as it takes; tokens that come meanwhile go to `said`."""
    caller.say(request)
    for _ in range(50):
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
        for reply in caller.hear():
            if not isinstance(reply, protocol.Welcome):
                return reply
    raise AssertionError(f"no answer to {request}")
