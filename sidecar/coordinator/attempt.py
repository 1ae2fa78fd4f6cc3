"""One target from its intent to its result: call, ask, wait, call again, within one allowance of time.

A part of the time is kept back for the question that turns a lost answer into a known one, so that a replica that is a
black hole costs its timeout and no more.

The request id is derived from what the replica says it is, so who is there is learned first, and the intent is put on
record then. A fresh id, derived from the last one, is used only after FAILED_PRECONDITION, which says for certain what
the last one did: engines answer a repeated id with the recorded result, so the refusal would come back for ever. After
anything else the same id is kept: engines that have done their part replay it instead of doing it again. After anything
uncertain the replica is asked before it is called.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator.port import Aim, Answer, Asked, Journal, JournalError, Replicas
from sidecar.coordinator.retry import Advice, Next, Retries, outcome_unknown
from sidecar.coordinator.targets import derive_request_id, next_request_id

_POLL_S: Final = 0.25
"""Between two questions about an operation that is still under way at its replica."""
_QUESTION_S: Final = 5.0
"""Longest wait for one answer to a question; a sidecar answers it from its own record."""
_RESERVE_SHARE: Final = 0.1
_RESERVE_MOST_S: Final = 1.0
_SHORTEST_S: Final = 0.05


class Attempt:
    """The tries of one target. `run` gives the final result and does not raise for what a replica does."""

    def __init__(
        self,
        operation_id: str,
        spec: fleet_pb2.OperationSpec,
        aim: Aim,
        wave: int,
        replicas: Replicas,
        journal: Journal,
        retries: Retries,
        *,
        given_up: asyncio.Event,
    ) -> None:
        """`retries.deadline` is when the target must have its result, on the loop's clock. Nothing is tried again once
        `given_up` is set.
        """
        self._operation_id = operation_id
        self._spec = spec
        self._aim = aim
        self._wave = wave
        self._replicas = replicas
        self._journal = journal
        self._retries = retries
        self._given_up = given_up
        self._calls = 0
        self._request_id = ""
        self._began = self._first_called = self._now()
        self._surely_not = True
        span = retries.deadline - self._now()
        self._call_deadline = retries.deadline - min(_RESERVE_MOST_S, span * _RESERVE_SHARE)

    async def run(self, recorded_request_id: str = "") -> fleet_pb2.TargetResult:
        """Take the target to its result. With `recorded_request_id` an intent is on record and its fate is unknown.

        Raises JournalError when an intent cannot be put on record; nothing was called with that id then.
        """
        self._request_id = recorded_request_id
        if recorded_request_id:
            self._first_called = -math.inf
        ask = bool(recorded_request_id)
        last: Answer | None = None
        while True:
            answer = await self._ask() if ask else await self._call()
            if answer is None:
                ask = False
                if self._now() + _SHORTEST_S < self._call_deadline:
                    continue
                answer = _never_executed(last) if self._surely_not else _forgotten(last)
            elif answer.result.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED and not self._surely_not:
                # Not called now, because it is gone; whether an earlier call was executed is not known for all that.
                answer = _forgotten(last)
            last = answer
            advice = self._retries.after(answer.result, self._now(), answer.retry_after_s)
            if advice.next is not Next.DONE and await self._given_up_within(advice.after_s):
                advice = Advice(Next.DONE, why="not tried again: the operation was cancelled")
            if advice.next is Next.DONE:
                if not self._surely_not and answer.result.execution == types_pb2.EXECUTION_NOT_EXECUTED:
                    # That is said of the last call; of an earlier one it is as little known as before.
                    answer = _forgotten(answer)
                answer = await self._last_question(answer)
                return self._complete(answer.result, advice.why)
            ask = advice.next is Next.ASK and bool(self._request_id)
            if advice.next is Next.REPEAT and answer.result.code == "FAILED_PRECONDITION" and self._request_id:
                try:
                    await self._intend(next_request_id(self._request_id))
                except JournalError as error:
                    return self._complete(answer.result, f"not tried again: the store failed: {error}")

    async def _given_up_within(self, seconds: float) -> bool:
        """Wait for the next try; whether there will be none."""
        try:
            async with asyncio.timeout(seconds):
                return await self._given_up.wait()
        except TimeoutError:
            return False

    async def _intend(self, request_id: str) -> None:
        await self._journal.intent(self._aim.name, request_id, self._wave)
        self._request_id = request_id

    async def _call(self) -> Answer:
        self._calls += 1
        if not self._request_id:
            who = await self._replicas.identify(self._aim, self._left_s())
            if isinstance(who, Answer):
                return who
            await self._intend(derive_request_id(self._operation_id, who))
        return await self._replicas.call(self._aim, self._spec, self._request_id, self._left_s())

    def _left_s(self) -> float:
        return max(_SHORTEST_S, self._call_deadline - self._now())

    async def _ask(self) -> Answer | None:
        """The replica's last word on this id; None when it does not know it."""
        while True:
            left = min(_QUESTION_S, self._call_deadline - self._now())
            asked = await self._replicas.ask(self._aim, self._request_id, max(_SHORTEST_S, left))
            if asked.known is False:
                self._surely_not = asked.records_s >= self._since_s()
                return None
            if asked.answer is not None:
                return asked.answer if asked.known else _still_unknown(asked.answer)
            if self._now() + _POLL_S >= self._call_deadline:
                return Answer(_under_way())
            await asyncio.sleep(_POLL_S)

    async def _last_question(self, answer: Answer) -> Answer:
        """Ask once more with the time kept back when the outcome is unknown and the replica may know it by now."""
        left = self._retries.deadline - self._now()
        if self._calls == 0 or not self._request_id or not outcome_unknown(answer.result) or left < _SHORTEST_S:
            return answer
        asked = await self._replicas.ask(self._aim, self._request_id, min(_QUESTION_S, left))
        return settled(asked, answer, self._since_s())

    def _since_s(self) -> float:
        """How long ago the replica may first have been called."""
        return self._now() - self._first_called

    def _complete(self, result: fleet_pb2.TargetResult, why: str) -> fleet_pb2.TargetResult:
        final = fleet_pb2.TargetResult()
        final.CopyFrom(result)
        final.replica = self._aim.name
        final.address = self._aim.address
        final.request_id = self._request_id
        final.attempts = self._calls
        final.wave = self._wave
        for key, value in self._aim.labels.items():
            final.labels[key] = value
        if why and (self._calls > 1 or not final.message):
            tried = f"{self._tried(result)}{why}"
            final.message = f"{final.message} ({tried})" if final.message else tried
        return final

    def _tried(self, last: fleet_pb2.TargetResult) -> str:
        """How many tries, and how long all of them took where they waited: the last one's text tells only its own time.

        Short tries with `wait` are as many as chance has it, and the texts of many replicas are to be alike.
        """
        if self._calls < 2:
            return ""
        spent_s = self._now() - self._began
        if last.took.seconds:
            return f"{self._calls} tries in {spent_s:.0f} s; "
        if spent_s >= max(1.0, 0.8 * (self._call_deadline - self._began)):
            return f"tried for {spent_s:.0f} s; "
        return "" if self._spec.wait else f"{self._calls} tries; "

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def settled(asked: Asked, lost: Answer, since_s: float) -> Answer:
    """What a replica's word on a request id makes of an answer that was lost; it was first called `since_s` before the
    word was heard.
    """
    if asked.known is None:
        return lost
    if asked.known is False:
        return _never_executed(lost) if asked.records_s >= since_s else _forgotten(lost)
    return asked.answer or Answer(_under_way())


def _still_unknown(answer: Answer) -> Answer:
    """A question that got no answer leaves the operation as unknown as it was."""
    result = fleet_pb2.TargetResult()
    result.CopyFrom(answer.result)
    result.outcome = fleet_pb2.TARGET_OUTCOME_UNKNOWN
    result.execution = types_pb2.EXECUTION_UNKNOWN
    return Answer(result, answer.retry_after_s)


def _under_way() -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(
        outcome=fleet_pb2.TARGET_OUTCOME_UNKNOWN,
        code="DEADLINE_EXCEEDED",
        reason="OUTCOME_UNKNOWN",
        message="the replica has started it and had no final result in time; ask it again by request id",
        execution=types_pb2.EXECUTION_UNKNOWN,
    )


def _forgotten(last: Answer | None) -> Answer:
    """The replica does not know the request id, and was restarted or replaced after it may have been called with it."""
    result = fleet_pb2.TargetResult()
    if last is not None:
        result.CopyFrom(last.result)
    result.outcome = fleet_pb2.TARGET_OUTCOME_UNKNOWN
    result.execution = types_pb2.EXECUTION_UNKNOWN
    result.code, result.reason = result.code or "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN"
    result.message = (
        "the replica has restarted or was replaced since the call, and whether it was executed before is not on record"
    )
    return Answer(result)


def _never_executed(last: Answer | None) -> Answer:
    """The replica was asked and does not know the request id: the call that was lost never reached an engine."""
    result = fleet_pb2.TargetResult(
        outcome=fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        code="DEADLINE_EXCEEDED",
        reason="NOT_EXECUTED",
        message="the replica does not know the request id: nothing was executed, and no time is left to call again",
    )
    if last is not None:
        result.code = last.result.code
        result.message = f"nothing was executed: the replica does not know the request id; {last.result.message}"
        result.took.CopyFrom(last.result.took)
    result.execution = types_pb2.EXECUTION_NOT_EXECUTED
    return Answer(result)
