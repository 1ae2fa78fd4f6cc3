"""Mutations of one replica: one at a time, at most one effect a request id, every outcome on record.

An operation runs in a task of its own, so a caller that goes away changes nothing. The same request id joins it while
it runs and gets the record afterwards; engines that never settled it (not reached, answer lost) are asked again under
the same id, which the engine's own record makes safe. Another operation meanwhile is ABORTED here, before any engine
hears of it: two operations that reach two ranks in different order would each be half refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import grpc

from engine_bridge import protocol
from sidecar.backends.engine import Answered, EngineBackend, EngineSet, Liveness, Lost, Submitted, Unreachable
from sidecar.replica.aggregate import EngineAnswer, Folded, fold
from sidecar.replica.audit import CUT_SHORT, GONE, AuditLog, Ending, Value, arguments
from sidecar.replica.operations_pause import LAST_UNDO_S, UNDO_S, undo
from sidecar.replica.operations_recall import blank, cannot_tell, learn, recalled, replayed, restarted, said, same
from sidecar.replica.record import Operation
from sidecar.replica.requests import Wanted
from sidecar.rpc.auth import Caller, Role
from sidecar.rpc.deadlines import Deadline
from sidecar.rpc.errors import failure

LOG: Final = logging.getLogger(__name__)

RECORDS: Final = 1000
"""Operations remembered; the engines remember as many themselves."""

_CONCLUDING_S: Final = 5.0
"""For an operation to be put on record once its engines are no longer waited for: it takes milliseconds."""

Cancellation = tuple[EngineBackend, protocol.Cancelled | Lost | Unreachable]
"""An engine, and what it said when it was asked to withdraw."""


class Observer(Protocol):
    """Counts operations for Prometheus."""

    def operation(self, operation: str, mode: str, code: str, seconds: float) -> None:
        """One operation has ended."""
        ...

    def engine_pause(self, operation: str, longest_us: int) -> None:
        """What one engine paid for it."""
        ...


class Operations:
    """Runs and remembers. Belongs to one event loop."""

    def __init__(self, engines: EngineSet, audit: AuditLog, observer: Observer, expected_engines: int = 0) -> None:
        """`expected_engines`: ranks that must be there, else the missing ones are reported; 0 for "as many as are"."""
        self._engines = engines
        self._audit = audit
        self._observer = observer
        self._expected = expected_engines
        self._records: OrderedDict[str, Operation] = OrderedDict()
        self._current: Operation | None = None
        self._stopping = False
        self._began = time.monotonic()

    # --- running -------------------------------------------------------------------------------------------------

    async def run(self, wanted: Wanted, deadline: Deadline, caller: Caller, peer: str) -> Folded:
        """Run, join or repeat. A Failure says that nothing was asked of any engine."""
        record = self._records.get(wanted.request_id)
        if record is not None and not same(record.wanted.mutation, wanted.mutation):
            raise failure(
                grpc.StatusCode.ABORTED,
                "REQUEST_ID_REUSED",
                f"request id {wanted.request_id} is on record for a {record.wanted.kind} with other arguments; "
                "use a new id for a new operation",
                metadata={"request_id": wanted.request_id},
            )
        if record is not None and record.running:
            return await self._wait(record, deadline)
        if record is not None and record.settled and record.folded is not None:
            return replayed(record.folded)
        self._refuse_when_stopping()
        self._refuse_when_busy(wanted)
        _refuse_when_late(wanted, deadline)
        record = record or Operation(wanted, time.time(), caller, peer)
        self._resolve_restarted(record)
        targets = self._targets(record)
        self._audit.begin(caller, peer, wanted.kind, wanted.request_id, arguments(wanted, targets))
        self._remember(record)
        self._current = record
        record.deadline = deadline.for_next_hop()
        # Created before anything is awaited: from here on the id joins and every other operation is told "busy".
        record.task = asyncio.create_task(self._run(record, targets), name=f"{wanted.kind} {wanted.request_id}")
        return await self._wait(record, deadline)

    def running(self) -> Operation | None:
        """The operation under way."""
        return self._current if self._current is not None and self._current.running else None

    async def stop(self, grace_s: float) -> None:
        """Take nothing new; let what runs end within the grace, withdrawing it before the grace is over if it waits."""
        self._stopping = True
        record = self.running()
        if record is None or record.task is None:
            return
        LOG.info("waiting for an operation to end request_id=%s grace_s=%.1f", record.wanted.request_id, grace_s)
        await asyncio.wait({record.task}, timeout=grace_s * 0.7)
        if record.running and record.wanted.kind != "pause":  # a pause is undone; withdrawn, it would be abandoned
            deadline_ns = Deadline.after(max(0.2, grace_s * 0.1)).at_ns
            await asyncio.gather(
                *(engine.cancel(record.wanted.request_id, deadline_ns) for engine in self._engines.engines())
            )
            await asyncio.wait({record.task}, timeout=grace_s * 0.2)
        if record.running:
            record.conclude()
            await asyncio.wait({record.task}, timeout=_CONCLUDING_S + LAST_UNDO_S)

    def _unfinished(self) -> Ending:
        return CUT_SHORT if self._stopping else GONE

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise failure(
                grpc.StatusCode.UNAVAILABLE,
                "SERVER_STOPPING",
                "this sidecar is shutting down and takes no new operation; nothing was changed",
                retry_after=5.0,
            )

    def _refuse_when_busy(self, wanted: Wanted) -> None:
        other = self.running()
        if other is None:
            return
        raise failure(
            grpc.StatusCode.ABORTED,
            "OPERATION_IN_PROGRESS",
            f"{other.wanted.kind} {other.wanted.request_id} by {other.caller.name} is under way here; nothing was "
            "changed. Wait for it, or withdraw it with CancelOperation",
            metadata={"request_id": wanted.request_id, "other_request_id": other.wanted.request_id},
            retry_after=0.2,
        )

    def _targets(self, record: Operation) -> list[EngineBackend]:
        """Engines to ask: all of them, but those that have settled this request id."""
        engines = list(self._engines.engines())
        if not engines:
            trouble = self._engines.trouble()
            reason = trouble.reason if trouble is not None else "NO_ENGINE"
            message = trouble.message if trouble is not None else f"no engine has appeared in {self._engines.place}"
            raise failure(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after=5.0)
        spoken_for = {answer.rank for answer in record.answers.values() if answer.reached}
        return [engine for engine in engines if self._is_target(record, engine, spoken_for)]

    @staticmethod
    def _is_target(record: Operation, engine: EngineBackend, spoken_for: set[int]) -> bool:
        """An engine that has not settled this id. Not the successor of one that was asked: its cache is cold, and the
        result says what became of its predecessor.
        """
        known = record.answers.get(engine.key)
        return not known.settled if known is not None else engine.rank not in spoken_for

    async def _run(self, record: Operation, targets: Sequence[EngineBackend]) -> None:
        began = time.monotonic()
        wanted = record.wanted
        record.asked = [
            asyncio.create_task(self._submit(engine, wanted.mutation, record.deadline)) for engine in targets
        ]
        if record.asked:
            await asyncio.wait(record.asked)
        for engine, task in zip(targets, record.asked, strict=True):
            record.answers[engine.key] = EngineAnswer(
                engine.rank,
                engine.incarnation,
                said(engine.rank, task),
                alive_after=engine.liveness() is not Liveness.DEAD,
            )
        folded = fold(wanted.kind, wanted.request_id, self._complete(record), wanted.mutation)
        if wanted.kind == "pause" and not folded.ok:
            present = {engine.key: engine for engine in self._engines.engines()}
            within_s = LAST_UNDO_S if self._stopping else UNDO_S
            record.answers.update(await undo(wanted.request_id, record.answers, present, within_s))
            folded = fold(wanted.kind, wanted.request_id, self._complete(record), wanted.mutation)
        record.folded = folded
        if not any(answer.reached for answer in record.answers.values()):
            # No engine has seen it: the id is not used up, and a retry is a first try.
            self._records.pop(wanted.request_id, None)
        self._account(record, folded, time.monotonic() - began)

    async def _submit(self, engine: EngineBackend, mutation: protocol.Mutation, deadline: Deadline) -> Submitted:
        try:
            return await engine.submit(mutation, deadline.at_ns)
        except Exception as error:
            # A defect of a backend must not take the other engines' results with it.
            LOG.exception("backend raised engine=%s request_id=%s", engine.key, mutation.request_id)
            return Unreachable("SERVER_DEFECT", f"engine {engine.rank}: {type(error).__name__}: {error}", sent=True)

    def _resolve_restarted(self, record: Operation) -> None:
        """Engines that may have run this id and are gone now."""
        present = {engine.key for engine in self._engines.engines()}
        for key in record.answers.keys() - present:
            answer = record.answers[key]
            if answer.settled:
                continue
            if answer.reached:
                record.answers[key] = replace(answer, submitted=restarted(answer))
            else:
                del record.answers[key]

    def _complete(self, record: Operation) -> list[EngineAnswer]:
        """Answers, with a place for each rank that was promised and is missing."""
        answers = list(record.answers.values())
        ranks = {answer.rank for answer in answers}
        absent = [rank for rank in range(self._expected) if rank not in ranks]
        for rank in absent[: max(0, self._expected - len(ranks))]:
            missing = Unreachable(
                "NO_ENGINE",
                f"engine {rank} has not appeared in {self._engines.place}; {self._expected} engines are expected",
            )
            answers.append(EngineAnswer(rank, "", missing))
        return answers

    async def _wait(self, record: Operation, deadline: Deadline) -> Folded:
        """The result, or DEADLINE_EXCEEDED when this caller's patience ends first. Never cancels the operation."""
        task = record.task
        if task is not None:
            await asyncio.wait({task}, timeout=deadline.until_last_words())
            if not task.done() and record.deadline.passed():
                # No engine begins it any more, so what is known now is what every caller can be told.
                record.conclude()
                await asyncio.wait({task}, timeout=_CONCLUDING_S)
            if task.done():
                task.result()
        if record.folded is None or record.running:
            left_s, wanted = record.deadline.remaining(), record.wanted
            longer = f" and may be for {left_s:.1f} s more, as its first caller allowed" if left_s else ""
            raise failure(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "OUTCOME_UNKNOWN",
                f"{wanted.kind} {wanted.request_id} is still under way{longer}; ask again with GetOperation",
                metadata={"request_id": wanted.request_id, "execution": "UNKNOWN"},
            )
        return record.folded

    def _remember(self, record: Operation) -> None:
        self._records[record.wanted.request_id] = record
        self._records.move_to_end(record.wanted.request_id)
        while len(self._records) > RECORDS:
            self._records.popitem(last=False)

    def _account(self, record: Operation, folded: Folded, took_s: float) -> None:
        wanted = record.wanted
        self._observer.operation(wanted.kind, wanted.mode, folded.code.name, took_s)
        for answer in record.answers.values():
            if isinstance(answer.submitted, Answered):
                cost = getattr(answer.submitted.outcome.result, "cost", None)
                if isinstance(cost, protocol.PauseCost) and not answer.submitted.outcome.replayed:
                    self._observer.engine_pause(wanted.kind, cost.longest_us)
        LOG.info(
            "operation ended operation=%s mode=%s request_id=%s code=%s reason=%s took_ms=%.1f",
            wanted.kind,
            wanted.mode or "-",
            wanted.request_id,
            folded.code.name,
            folded.reason or "-",
            took_s * 1e3,
        )
        self._audit.ended(record.caller, record.peer, wanted.kind, wanted.request_id, _ending(folded), took_s)

    # --- asking afterwards ---------------------------------------------------------------------------------------

    async def find(self, request_id: str, deadline: Deadline) -> Operation | None:
        """The operation on record, here or at the engines; None when nobody knows the id. What was unknown is asked
        of the engines again.
        """
        record = self._records.get(request_id)
        if record is None:
            return await self._ask_engines(request_id, deadline)
        if not record.running and not record.settled:
            await self._refresh(record, deadline)
        return record

    def records_reach_back_s(self) -> float:
        """For how long an operation that began here would be on record, here or at every engine, seconds.

        An engine that came later, beside a sidecar that came later, knows nothing of what its predecessor did.
        """
        facts = [engine.facts for engine in self._engines.engines()]
        ages = [time.monotonic() - each.attached_at if each and each.attached_at else 0.0 for each in facts]
        return max(time.monotonic() - self._began, min(ages, default=0.0))

    async def _refresh(self, record: Operation, deadline: Deadline) -> None:
        self._resolve_restarted(record)
        open_ones = [
            engine
            for engine in self._engines.engines()
            if engine.key in record.answers
            and record.answers[engine.key].reached
            and not record.answers[engine.key].settled
        ]
        at_ns = deadline.for_next_hop().at_ns
        found = await asyncio.gather(*(engine.lookup(record.wanted.request_id, at_ns) for engine in open_ones))
        for engine, recollection in zip(open_ones, found, strict=True):
            learnt = learn(recollection)
            if learnt is not None:
                record.answers[engine.key] = replace(record.answers[engine.key], submitted=learnt)
        answers = self._complete(record)
        record.folded = fold(record.wanted.kind, record.wanted.request_id, answers, record.wanted.mutation)

    async def _ask_engines(self, request_id: str, deadline: Deadline) -> Operation | None:
        """Ask the engines, which have their own records: this sidecar was restarted, or another one ran it."""
        engines = list(self._engines.engines())
        at_ns = deadline.for_next_hop().at_ns
        found = await asyncio.gather(*(engine.lookup(request_id, at_ns) for engine in engines))
        outcomes = [answer.outcome for answer in found if isinstance(answer, protocol.Found) and answer.outcome]
        if not any(isinstance(answer, protocol.Found) and answer.known for answer in found):
            unasked = [answer for answer in found if isinstance(answer, Lost | Unreachable)]
            if unasked:
                raise cannot_tell(request_id, unasked)
            return None
        kind = outcomes[0].operation if outcomes else "reset"
        if kind == "renew":
            return None
        record = Operation(Wanted(kind, "", blank(kind, request_id)), 0.0, Caller("unknown", Role.VIEWER), "")
        running = not outcomes or any(
            isinstance(answer, protocol.Found) and answer.known and answer.outcome is None for answer in found
        )
        for engine, answer in zip(engines, found, strict=True):
            record.answers[engine.key] = recalled(engine, answer)
        if not running:
            record.folded = fold(kind, request_id, list(record.answers.values()))
        return record

    async def cancel(self, request_id: str, deadline: Deadline, caller: Caller, peer: str) -> list[Cancellation]:
        """Ask every engine to withdraw it."""
        engines = list(self._engines.engines())
        self._audit.begin(caller, peer, "cancel", request_id, {"engines": [engine.rank for engine in engines]})
        began = time.monotonic()
        at_ns = deadline.for_next_hop().at_ns
        try:
            answers = await asyncio.gather(*(engine.cancel(request_id, at_ns) for engine in engines))
        except asyncio.CancelledError:
            self._audit.ended(caller, peer, "cancel", request_id, self._unfinished(), time.monotonic() - began)
            raise
        withdrawn = any(isinstance(answer, protocol.Cancelled) and answer.cancelled for answer in answers)
        # The call itself succeeds whatever the engines say; an operation that had ended is nothing to withdraw.
        ending = Ending("OK", message="; ".join(dict.fromkeys(answer.message for answer in answers if answer.message)))
        took_s = time.monotonic() - began
        self._observer.operation("cancel", "", ending.code, took_s)
        self._audit.ended(caller, peer, "cancel", request_id, ending, took_s, cancelled=withdrawn)
        return list(zip(engines, answers, strict=True))

    async def renew(self, renewal: protocol.Renew, deadline: Deadline, caller: Caller, peer: str) -> Folded:
        """Extend a lease on every engine. Not recorded: a renewal is its own repeat."""
        self._refuse_when_stopping()
        wanted = Wanted("pause", "", blank("pause", renewal.pause_request_id))
        targets = self._targets(Operation(wanted, 0.0, caller, peer))
        details: dict[str, Value] = {
            "lease_s": renewal.lease_ns / 1e9,
            "weights_complete": renewal.weights_complete,
            "engines": [engine.rank for engine in targets],
        }
        self._audit.begin(caller, peer, "renew", renewal.pause_request_id, details)
        began = time.monotonic()
        at_ns = deadline.for_next_hop().at_ns
        try:
            submitted = await asyncio.gather(*(engine.renew(renewal, at_ns) for engine in targets))
        except asyncio.CancelledError:
            self._audit.ended(
                caller, peer, "renew", renewal.pause_request_id, self._unfinished(), time.monotonic() - began
            )
            raise
        answers = [
            EngineAnswer(engine.rank, engine.incarnation, answer)
            for engine, answer in zip(targets, submitted, strict=True)
        ]
        folded = fold("renew", renewal.pause_request_id, answers)
        took = time.monotonic() - began
        self._observer.operation("renew", "", folded.code.name, took)
        self._audit.ended(caller, peer, "renew", renewal.pause_request_id, _ending(folded), took)
        return folded


def _refuse_when_late(wanted: Wanted, deadline: Deadline) -> None:
    if deadline.passed():
        raise failure(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "NOT_EXECUTED",
            f"{wanted.kind} {wanted.request_id} came at its caller's deadline; nothing was asked of any engine",
            metadata={"request_id": wanted.request_id, "execution": "NOT_EXECUTED"},
        )


def _ending(folded: Folded) -> Ending:
    return Ending(folded.code.name, folded.reason, folded.message)
