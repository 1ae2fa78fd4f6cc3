"""One mutation at a time, at most once a request id, never after its deadline, in slices between engine steps.

The dispatcher is a state machine on the engine's thread with no I/O of its own: messages come in through `handle` with
a function that sends the reply, time comes from a clock, and `tick` is called at every step boundary. What it promises:

* A request id is noted in the page before its deadline is looked at, so that an id absent from the page after the
  deadline was never executed.
* The same id again joins the operation while it runs, and gets the recorded outcome afterwards; with other arguments it
  is told "mismatch". See `outcomes` for how long the record is.
* Another operation while one runs, or waits for an idle moment, is told "busy" and by which id.
* A caller that goes away changes nothing: the outcome is recorded for whoever asks again.
* An operation that raises is answered "raised"; nothing it raises reaches the engine's loop.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from engine_bridge import protocol
from engine_bridge.operations import Context, Lease, Memory, Meter, Verdict
from engine_bridge.operations.admission import read_admission
from engine_bridge.operations.catalog import OPERATION_NAMES, begin
from engine_bridge.operations.pause import end_lease, forget_what_others_ended, renew
from engine_bridge.outcomes import Outcomes, fingerprint
from engine_bridge.port import EnginePort, Work

SLICE_NS: Final = 1_500_000
"""Time one boundary gives to an operation before the engine steps again; well below the promised 5 ms."""
MAX_TEXT: Final = 2000
"""Longest message in an outcome, characters."""
BUSY_RETRY_MS: Final = 100

logger = logging.getLogger("vllm.kvctl")

Reply = Callable[[protocol.Reply], None]


class Recorder(Protocol):
    """What the outside keeps of operations: the page."""

    def note_started(self, request_id: str, now_ns: int) -> None:
        """An operation was taken up; its deadline has not been looked at yet."""
        ...

    def note_reset(self, mode: protocol.RunningMode, now_ns: int) -> None:
        """The prefix cache was dropped."""
        ...

    def note_working(self, working: bool) -> None:
        """The engine thread starts or stops working on an operation."""
        ...

    def note_operation(self, now_ns: int, longest_us: int) -> None:
        """An operation ended."""
        ...

    def note_abandoned(self, abandoned: bool) -> None:
        """A weight update was abandoned, or that state ended."""
        ...


@dataclass(slots=True)
class _Waiter:
    """Somebody who wants the outcome."""

    call: int
    reply: Reply


@dataclass(slots=True)
class _Active:
    """The operation in force."""

    request: protocol.Mutation
    waiters: list[_Waiter]
    meter: Meter
    work: Work[Verdict] | None = None
    """None while it waits for an idle moment."""
    context: Context | None = None
    waits_for_step: bool = False

    @property
    def can_be_withdrawn(self) -> bool:
        """Whether ending it now leaves everything as if it had never been asked for."""
        return self.work is None or (self.context is not None and self.context.untouched)


def _canonical(request_id: str) -> str:
    """The one spelling of a UUID that the record and the page know; empty when it is none."""
    try:
        return str(uuid.UUID(request_id))
    except ValueError:
        return ""


class Dispatcher:
    """See the module."""

    def __init__(
        self,
        port: EnginePort,
        recorder: Recorder,
        *,
        clock: Callable[[], int],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`clock` gives CLOCK_MONOTONIC nanoseconds; `stopping` is true once the engine has begun to shut down."""
        self._port = port
        self._recorder = recorder
        self._clock = clock
        self._stopping = stopping
        self._active: _Active | None = None
        self._outcomes = Outcomes()
        self.memory = Memory()

    # --- for the loop --------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether `tick` has nothing to do, now or at any later time, until somebody calls `handle`."""
        return self._active is None and self.memory.lease is None and not self.memory.abandoned

    @property
    def wants_turn(self) -> bool:
        """Whether work is left that an idle engine should go on with at once."""
        active = self._active
        return active is not None and active.work is not None and not active.waits_for_step

    @property
    def waits_for_step(self) -> bool:
        """Whether that work can only go on after the engine has stepped."""
        return self._active is not None and self._active.waits_for_step

    def next_timer_ns(self) -> int:
        """The next instant at which `tick` must run even if nothing else happens; 0 for none."""
        instants = []
        active = self._active
        if active is not None and (active.work is None or active.waits_for_step):
            instants.append(active.request.deadline_ns)
        if self.memory.lease is not None:
            instants.append(self.memory.lease.expires_ns)
        return min(instants, default=0)

    def tick(self) -> None:
        """Called at every step boundary: fires what is armed, ends what is overdue, goes on with what runs."""
        active = self._active
        if active is not None and active.work is None:
            self._look_for_idle(active)
            active = self._active
        if active is not None and active.work is not None:
            self._go_on(active)
        if self._active is None and (self.memory.lease is not None or self.memory.abandoned):
            self._look_after_pause()

    def stop(self) -> None:
        """The engine stops: what has begun is brought to its end, whoever still waits is told, nothing new starts."""
        active = self._active
        if active is None:
            return
        while active.work is not None and self._active is active:
            self._go_on(active)
            if active.waits_for_step:
                break
        if self._active is not active:
            return
        # What is left was waiting: for an idle moment, or for steps that will not come.
        if active.work is not None:
            active.work.close()
        message = "the engine shut down before the operation could start"
        self._finish(active, Verdict("stopping", reason="ENGINE_STOPPING", message=message))

    # --- messages ------------------------------------------------------------------------------------------------

    def handle(self, request: protocol.Request, reply: Reply) -> None:
        """Take one message. Every message but Hello is answered exactly once, now or when its operation ends."""
        match request:
            case protocol.Ping():
                reply(protocol.Pong(request.call, self._clock()))
            case protocol.Admission():
                self._admission(request, reply)
            case protocol.Lookup():
                reply(self._lookup(request))
            case protocol.Cancel():
                reply(self._cancel(request))
            case protocol.Renew():
                reply(self._renew(request))
            case protocol.Hello():
                raise AssertionError("the listener answers Hello")
            case _:
                self._mutate(request, reply)

    def _admission(self, request: protocol.Admission, reply: Reply) -> None:
        try:
            evidence = read_admission(self._port, request, self.memory)
        except Exception as error:  # reading evidence must not end the engine
            logger.exception("kvctl: reading admission evidence failed")
            reply(protocol.Fault(request.call, _describe(error)))
            return
        reply(evidence)

    def _lookup(self, request: protocol.Lookup) -> protocol.Found:
        request_id = _canonical(request.request_id)
        recorded = self._outcomes.find(request_id)
        if recorded is not None:
            outcome = recorded.again(request.call)
            return protocol.Found(request.call, request.request_id, known=True, outcome=outcome)
        running = self._active is not None and self._active.request.request_id == request_id
        return protocol.Found(request.call, request.request_id, known=running)

    def _cancel(self, request: protocol.Cancel) -> protocol.Cancelled:
        request_id = _canonical(request.request_id)
        lease = self.memory.lease
        if lease is not None and lease.request_id == request_id:
            # The pause itself is over; what can still be withdrawn is its lease.
            lease.expires_ns, lease.withdrawn = self._clock(), True
            if self._active is None:
                # Now and not at the next boundary: a new pause may be the very next message.
                self._end_lease(lease)
            return protocol.Cancelled(
                request.call, request.request_id, cancelled=True, message="the lease ends now, as if it had expired"
            )
        active = self._active
        if active is None or active.request.request_id != request_id:
            known = self._outcomes.find(request_id) is not None
            message = "it has ended already" if known else "no such operation is on record on this engine"
            return protocol.Cancelled(request.call, request.request_id, cancelled=False, message=message)
        if not active.can_be_withdrawn:
            return protocol.Cancelled(
                request.call, request.request_id, cancelled=False, message="it has started and will finish"
            )
        if active.work is not None:
            active.work.close()
        self._finish(active, Verdict("withdrawn", reason="CANCELLED", message="cancelled before it changed anything"))
        return protocol.Cancelled(request.call, request.request_id, cancelled=True)

    def _renew(self, request: protocol.Renew) -> protocol.Outcome:
        verdict = renew(self._port, request, self.memory, self._clock())
        return protocol.Outcome(
            request.call,
            request.pause_request_id,
            "renew",
            verdict.state,
            verdict.reason,
            verdict.message,
            verdict.result,
        )

    def _mutate(self, request: protocol.Mutation, reply: Reply) -> None:
        request_id = _canonical(request.request_id)
        if not request_id:
            self._tell(reply, request, Verdict("invalid", reason="INVALID_FIELD", message="request_id is not a UUID"))
            return
        request = msgspec.structs.replace(request, request_id=request_id)
        active = self._active
        if active is not None and active.request.request_id == request.request_id:
            if fingerprint(active.request) != fingerprint(request):
                self._tell(reply, request, _mismatch(active.request))
                return
            active.waiters.append(_Waiter(request.call, reply))
            return
        recorded = self._outcomes.find(request.request_id)
        if recorded is not None:
            if recorded.fingerprint != fingerprint(request):
                self._tell(reply, request, _mismatch(request))
                return
            reply(recorded.again(request.call))
            return
        if self._stopping():
            verdict = Verdict("stopping", reason="ENGINE_STOPPING", message="the engine is shutting down")
            self._tell(reply, request, verdict)
            return
        if active is not None:
            verdict = Verdict(
                "busy",
                reason="OPERATION_IN_PROGRESS",
                message=f"{OPERATION_NAMES[type(active.request)]} {active.request.request_id} "
                + ("waits for an idle moment" if active.work is None else "is running"),
                retry_after_ms=BUSY_RETRY_MS,
            )
            self._tell(reply, request, verdict, other=active.request.request_id)
            return
        self._start(request, reply)

    # --- one operation -------------------------------------------------------------------------------------------

    def _start(self, request: protocol.Mutation, reply: Reply) -> None:
        active = _Active(request, [_Waiter(request.call, reply)], Meter(self._clock))
        self._active = active
        waits = isinstance(request, protocol.Reset) and request.wait_for_idle and request.running == "fail"
        if waits and self._clock() < request.deadline_ns:
            self._look_for_idle(active)
            return
        self._take_up(active)

    def _look_for_idle(self, active: _Active) -> None:
        """An armed operation fires at the first boundary without a held block, or is withdrawn at its deadline."""
        if self._stopping():
            verdict = Verdict("stopping", reason="ENGINE_STOPPING", message="the engine is shutting down")
            self._finish(active, verdict)
        elif self._clock() >= active.request.deadline_ns:
            message = "no moment without a held block came before the deadline"
            if self._port.paused():
                message += "; the scheduler is paused, so its requests cannot finish"
            self._finish(active, Verdict("withdrawn", reason="NEVER_IDLE", message=message))
        elif self._port.held_blocks() == 0:
            self._take_up(active)

    def _take_up(self, active: _Active) -> None:
        """Note it, then look at the deadline, then work: in this order, see `page`."""
        request = active.request
        now = self._clock()
        self._recorder.note_started(request.request_id, now)
        if now >= request.deadline_ns:
            late_ms = (now - request.deadline_ns) // 1_000_000
            message = (
                f"the deadline had passed {late_ms} ms before the engine thread could take it up; nothing was done"
            )
            self._finish(active, Verdict("expired", reason="NOT_EXECUTED", message=message))
            return
        self._begin(active, lambda context: begin(self._port, request, context))

    def _begin(self, active: _Active, start: Callable[[Context], Work[Verdict]]) -> None:
        active.context = Context(
            clock=self._clock,
            deadline_ns=active.request.deadline_ns,
            memory=self.memory,
            note_reset=lambda mode: self._recorder.note_reset(mode, self._clock()),
            meter=active.meter,
        )
        active.work = start(active.context)
        self._go_on(active)

    def _go_on(self, active: _Active) -> None:
        """One slice."""
        work = active.work
        assert work is not None
        began = self._clock()
        verdict: Verdict | None = None
        active.waits_for_step = False
        self._recorder.note_working(True)
        active.meter.start()
        try:
            while verdict is None:
                if next(work) == "step":
                    active.waits_for_step = True
                    break
                if self._clock() - began >= SLICE_NS:
                    break
        except StopIteration as stop:
            verdict = stop.value
        except Exception as error:  # whatever an operation raises, the engine goes on serving
            logger.exception("kvctl: %s %s raised", OPERATION_NAMES[type(active.request)], active.request.request_id)
            verdict = Verdict("raised", reason="OPERATION_RAISED", message=_describe(error))
        finally:
            active.meter.stop()
            self._recorder.note_working(False)
        if verdict is not None:
            self._finish(active, verdict)

    def _finish(self, active: _Active, verdict: Verdict) -> None:
        self._active = None
        self._answer(active, verdict)

    def _answer(self, active: _Active, verdict: Verdict) -> None:
        request = active.request
        cost = active.meter.cost()
        result = verdict.result
        if result is not None and not isinstance(result, protocol.SchedulingResult):
            result = msgspec.structs.replace(result, cost=cost)
        if cost.slices:
            self._recorder.note_operation(self._clock(), cost.longest_us)
        self._recorder.note_abandoned(bool(self.memory.abandoned))
        outcome = protocol.Outcome(
            0,
            request.request_id,
            OPERATION_NAMES[type(request)],
            verdict.state,
            verdict.reason,
            _fit(verdict.message),
            result,
            retry_after_ms=verdict.retry_after_ms,
        )
        self._outcomes.put(request, outcome)
        for waiter in active.waiters:
            waiter.reply(msgspec.structs.replace(outcome, call=waiter.call))

    def _look_after_pause(self) -> None:
        forget_what_others_ended(self._port, self.memory)
        lease = self.memory.lease
        if lease is not None and self._clock() >= lease.expires_ns:
            self._end_lease(lease)
        elif lease is None and not self.memory.abandoned:
            self._recorder.note_abandoned(False)

    def _end_lease(self, lease: Lease) -> None:
        """The engine acts by itself: an operation like any other, except that nobody waits for it."""
        request = protocol.Resume(0, str(uuid.uuid4()), 2**63 - 1, pause_request_id=lease.request_id)
        active = _Active(request, [], Meter(self._clock))
        self._active = active
        self._begin(active, lambda context: end_lease(self._port, context))
        # Whatever became of it, this lease has had its end: a defect must not be tried again at every step.
        self.memory.lease = None

    def _tell(self, reply: Reply, request: protocol.Mutation, verdict: Verdict, other: str = "") -> None:
        """Answer without putting anything on record."""
        reply(
            protocol.Outcome(
                request.call,
                request.request_id[:64],
                OPERATION_NAMES[type(request)],
                verdict.state,
                verdict.reason,
                verdict.message,
                other_request_id=other,
                retry_after_ms=verdict.retry_after_ms,
            )
        )


def _mismatch(on_record: protocol.Mutation) -> Verdict:
    return Verdict(
        "mismatch",
        reason="REQUEST_ID_REUSED",
        message=f"request id {on_record.request_id} is on record with other arguments; a new operation needs a new id",
    )


def _describe(error: BaseException) -> str:
    return _fit(f"{type(error).__name__}: {error}")


def _fit(text: str) -> str:
    """Text that can go into a frame: capped, and valid UTF-8 whatever an exception brought along."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")
