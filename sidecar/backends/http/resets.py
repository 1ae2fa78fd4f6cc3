"""Resets over HTTP: one POST for all ranks, at most one a request id, and never a word more than vLLM said.

vLLM's routes know no deadline and no request id. So what the bridge does at the engine is done here as far as it goes:
ranks that ask under one request id share one run; a repeat gets the record; another id meanwhile is told "busy". What
cannot be done here is to withdraw: a POST that is out may be run by vLLM a minute later. So when the deadline passes,
the answer is UNKNOWN, the run goes on waiting in the background, and a lookup by request id has its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Lost, Submitted, Unreachable
from sidecar.backends.http.client import HttpError, NotSentError, Reply
from sidecar.backends.http.exposition import RankGauges
from sidecar.backends.http.outcomes import Replies, reset_outcome
from sidecar.backends.http.replies import Meaning, Reading, read_empty, read_reset

RECORDS: Final = 256
BACKGROUND_S: Final = 600.0
"""How long a run waits for vLLM after its caller has stopped waiting."""

Post = Callable[[str, float], Awaitable[Reply]]
"""(path, timeout in seconds) -> reply; HttpError otherwise."""


@dataclass(slots=True)
class Run:
    """One reset under one request id."""

    asked: protocol.Reset
    sent: bool = False
    """Whether a POST may have reached vLLM."""
    replies: Replies | None = None
    failed: Submitted | None = None
    """Set instead of `replies` when there is no usable reply to the first POST."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.task is not None and self.task.done()

    def same_arguments(self, other: protocol.Reset) -> bool:
        """Whether a repeat asks for the same."""
        return msgspec.structs.replace(other, call=0, deadline_ns=0) == msgspec.structs.replace(
            self.asked, call=0, deadline_ns=0
        )

    def outcome(self, rank: int) -> Submitted:
        """What is known for one rank, once done."""
        if self.failed is not None:
            return self.failed
        if self.replies is None:
            return Lost("unknown", "the reset ended without a reply")
        return Answered(reset_outcome(self.asked, self.replies, rank))


class Resets:
    """The resets of one API server."""

    def __init__(self, post: Post, version: Callable[[], str], gauges: Callable[[], dict[int, RankGauges]]) -> None:
        """`version` and `gauges` tell what is known of the server now."""
        self._post = post
        self._version = version
        self._gauges = gauges
        self._runs: OrderedDict[str, Run] = OrderedDict()

    async def close(self) -> None:
        """Wait for nothing more; what vLLM still does is not undone by that."""
        tasks = [run.task for run in self._runs.values() if run.task is not None and not run.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, asked: protocol.Reset, rank: int, deadline_ns: int) -> Submitted:
        """Run, join or repeat; see EngineBackend.submit."""
        run = self._runs.get(asked.request_id)
        replayed = run is not None and run.done
        if run is not None and not run.same_arguments(asked):
            return self._answer(asked, "mismatch", "REQUEST_ID_REUSED", "on record with other arguments")
        if run is not None and replayed and run.failed is not None and not run.sent:
            del self._runs[asked.request_id]  # nothing happened then, so it may be tried now
            run, replayed = None, False
        if run is None and time.monotonic_ns() >= deadline_ns:
            return Lost("not_executed", "the reset was not sent to vLLM: there was no time left")
        if run is None:
            other = next((r for r in self._runs.values() if not r.done), None)
            if other is not None:
                busy = f"reset {other.asked.request_id} is still under way at this vLLM"
                outcome = protocol.Outcome(asked.call, asked.request_id, "reset", "busy", "OPERATION_IN_PROGRESS", busy)
                return Answered(msgspec.structs.replace(outcome, other_request_id=other.asked.request_id))
            run = self._start(asked)
        assert run.task is not None
        left = max(deadline_ns - time.monotonic_ns(), 0) / 1e9
        with contextlib.suppress(asyncio.CancelledError):  # no longer waited for: as if its time had ended now
            await asyncio.wait({run.task}, timeout=left)
        if not run.task.done():
            return await self._out_of_time(run)
        found = run.outcome(rank)
        if replayed and isinstance(found, Answered):
            return Answered(msgspec.structs.replace(found.outcome, replayed=True))
        return found

    def lookup(self, request_id: str, rank: int) -> protocol.Found:
        """The record of a request id."""
        run = self._runs.get(request_id)
        if run is None:
            return protocol.Found(0, request_id, known=False)
        found = run.outcome(rank) if run.done else None
        return protocol.Found(0, request_id, True, found.outcome if isinstance(found, Answered) else None)

    def cancel(self, request_id: str) -> protocol.Cancelled:
        """Nothing that is out can be called back."""
        run = self._runs.get(request_id)
        if run is None or run.done:
            return protocol.Cancelled(0, request_id, False, "nothing under way here has that id")
        if not run.sent and run.task is not None:
            run.task.cancel()
            return protocol.Cancelled(0, request_id, True)
        return protocol.Cancelled(0, request_id, False, "it has been sent to vLLM, whose routes cannot be called back")

    def _start(self, asked: protocol.Reset) -> Run:
        run = Run(asked)
        run.task = asyncio.get_running_loop().create_task(self._run(run), name=f"http reset {asked.request_id}")
        self._runs[asked.request_id] = run
        while len(self._runs) > RECORDS:
            oldest = next((key for key, kept in self._runs.items() if kept.done), None)
            if oldest is None:
                break
            del self._runs[oldest]
        return run

    async def _out_of_time(self, run: Run) -> Submitted:
        if run.sent or run.task is None:
            return Lost(
                "unknown",
                "vLLM has not answered the reset in time and may still run it: its HTTP route knows no deadline; look "
                "it up by request id",
            )
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        run.failed = Lost("not_executed", "the reset was not sent in time and will not be")
        return run.failed

    async def _run(self, run: Run) -> None:
        asked = run.asked
        before = dict(self._gauges())
        try:
            prefix, connector = await self._caches(run)
        except NotSentError as error:
            run.failed = Unreachable("ENGINE_NOT_ANSWERING", f"nothing was sent: {error}")
            return
        except HttpError as error:
            run.failed = Lost("unknown", f"the reset was sent and no answer came: {error}")
            return
        if prefix.meaning in _NOTHING_HAPPENED:
            run.failed = _refusal(asked, prefix)
            return
        multimodal = encoder = None
        if prefix.meaning in (Meaning.SUCCEEDED, Meaning.UNCONFIRMED):
            multimodal = await self._empty("/reset_mm_cache") if asked.mm else None
            encoder = await self._empty("/reset_encoder_cache") if asked.encoder else None
        run.replies = Replies(prefix, connector, multimodal, encoder, self._version(), before)

    async def _caches(self, run: Run) -> tuple[Reading, Reading | None]:
        """The prefix cache and, if asked for, the connector: one call, and where its "false" could mean either, a
        second one that asks for the prefix cache alone and tells them apart.
        """
        asked = run.asked
        preempt = "true" if asked.running == "preempt" else "false"
        external = "true" if asked.connector else "false"
        path = f"/reset_prefix_cache?reset_running_requests={preempt}&reset_external={external}"
        run.sent = True
        both = read_reset(await self._post_or_unsend(run, path))
        if not asked.connector or both.meaning is not Meaning.REFUSED:
            attempted = both.meaning in (Meaning.SUCCEEDED, Meaning.UNCONFIRMED)
            return both, both if asked.connector and attempted else None
        if asked.running == "preempt":
            # A preempting reset that fails locally raises, so only the connector can have said no.
            return Reading(Meaning.SUCCEEDED, ""), both
        alone = read_reset(await self._post("/reset_prefix_cache?reset_running_requests=false", BACKGROUND_S))
        if alone.meaning is Meaning.SUCCEEDED:
            return alone, both
        # vLLM resets the connector even where the local cache refused, and says nothing of it.
        return alone, Reading(Meaning.UNCONFIRMED, "the prefix cache was refused; the connector may have been reset")

    async def _post_or_unsend(self, run: Run, path: str) -> Reply:
        try:
            return await self._post(path, BACKGROUND_S)
        except NotSentError:
            run.sent = False
            raise

    async def _empty(self, path: str) -> Reading:
        try:
            return read_empty(await self._post(path, BACKGROUND_S))
        except HttpError as error:
            return Reading(Meaning.UNCONFIRMED, f"no answer: {error}")

    def _answer(self, asked: protocol.Reset, state: protocol.OutcomeState, reason: str, text: str) -> Submitted:
        return Answered(protocol.Outcome(asked.call, asked.request_id, "reset", state, reason, text))


_NOTHING_HAPPENED: Final = frozenset({Meaning.NO_ROUTE, Meaning.DENIED, Meaning.UNAVAILABLE})


def _refusal(asked: protocol.Reset, reading: Reading) -> Submitted:
    if reading.meaning is Meaning.NO_ROUTE:
        return Answered(
            protocol.Outcome(
                asked.call, asked.request_id, "reset", "unsupported", "NEEDS_DEV_MODE", needs_dev_mode(reading.text)
            )
        )
    if reading.meaning is Meaning.DENIED:
        return Unreachable("ENGINE_NOT_TRUSTED", f"vLLM, or a proxy before it, denied the reset: {reading.text}")
    return Unreachable("ENGINE_NOT_ANSWERING", f"vLLM cannot be reached behind its address: {reading.text}", sent=True)


def needs_dev_mode(found: str) -> str:
    """How to get the routes, and the better way."""
    return (
        f"vLLM's reset routes are off ({found}); install kvctl beside vLLM for the engine bridge, or start vLLM with "
        "VLLM_SERVER_DEV_MODE=1 (which also exposes /collective_rpc, so never beyond loopback)"
    )
