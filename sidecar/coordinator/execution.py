"""Runs one fleet operation to its end, wherever it runs: in kvctl, in the coordinator, in the operator.

The decisions are elsewhere (`rollout`: which target and when; `attempt` and `retry`: call, ask, again, give up); here
they meet the interfaces in `port` and the running asyncio loop, which is the only clock. kvctl gives a journal that
keeps nothing; the coordinator gives one that is on disk before it returns, and after a crash hands what was recorded
back as `Recorded`.

The order for one target is the promise: intent on record, then the call, then the result on record. A target whose
intent has no result is asked for by request id first, and called with the same id only if the replica does not know
it, so that a crash at any point gives one effect.

Every target ends with one result, whatever happens, also when the journal fails or this code raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.attempt import Attempt
from sidecar.coordinator.port import Aim, Health, Journal, JournalError, NoJournal, Recorded, Replicas
from sidecar.coordinator.retry import Retries, RetryBudget, RetryPolicy
from sidecar.coordinator.rollout import MAX_CONCURRENCY, Decision, Drop, Ending, Policy, Progress, Rollout

DEFAULT_TIMEOUT_S: Final = 30.0
_LOOK_TIMEOUT_S: Final = 5.0
_TELL_HEALTH_EVERY_S: Final = 5.0
"""What is told of a target's health while a wave waits for it is at most so old."""

_NO_TARGET: Final = frozenset({outcomes.DUPLICATE_TARGET, outcomes.TARGET_NOT_READY})
"""Reasons of targets that turn out not to be called at their turn: known by another name, or gone since."""

_log = logging.getLogger(__name__)

OnChange = Callable[[fleet_pb2.TargetResult], None]


class Execution:
    """One run of one operation. Make it, `await run()`, and read `results`; the loop it runs on owns it."""

    def __init__(
        self,
        operation_id: str,
        spec: fleet_pb2.OperationSpec,
        aims: Sequence[Aim],
        replicas: Replicas,
        *,
        journal: Journal | None = None,
        recorded: Mapping[str, Recorded] | None = None,
        on_change: OnChange | None = None,
        on_health: OnChange | None = None,
        retry_policy: RetryPolicy | None = None,
        spent_s: Mapping[str, float] | None = None,
        most_calls: int = MAX_CONCURRENCY,
    ) -> None:
        """`aims` in the order in which to take them. PolicyError when the rollout makes no sense.

        `on_change` is told every change of a target, on the loop: a call begun (RUNNING) and the final result.
        `on_health` is told the row of a target that has ended when the row's `health` has changed.
        `spent_s`: name -> seconds of a target's time limit that went into asking who it is. `most_calls`: under way at
        once, also where the rollout allows more: each needs a connection.
        """
        self.operation_id = operation_id
        self.spec = spec
        self.results: dict[str, fleet_pb2.TargetResult] = {}
        """Final results so far, by name."""
        self.warnings: list[str] = []
        self.retries = 0
        """Calls and questions beyond the first, over all targets that have ended."""
        self._aims = {aim.name: aim for aim in aims}
        self._replicas = replicas
        self._journal = journal or NoJournal()
        self._recorded = dict(recorded or {})
        self._on_change = on_change or (lambda _: None)
        self._on_health = on_health or (lambda _: None)
        self._health_told: dict[str, tuple[bool, float]] = {}
        """Targets that a wave waits for: whether healthy, and when that was told last."""
        self._retry_policy = retry_policy or RetryPolicy()
        self._budget = RetryBudget.for_targets(len(aims))
        self._spent_s = dict(spent_s or {})
        self._timeout_s = spec.timeout.seconds + spec.timeout.nanos / 1e9 or DEFAULT_TIMEOUT_S
        policy = Policy.resolve(spec.rollout, len(aims))
        policy = replace(policy, concurrency=min(policy.concurrency, most_calls))
        # A check changes nothing: it needs no waves, whatever rollout it checks.
        self._policy = Policy(concurrency=policy.concurrency) if spec.validate_only else policy
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calling: set[str] = set()
        self._moved = asyncio.Event()
        self._held = False
        self._cancel_why = ""
        self._cancelled = asyncio.Event()
        self._rollout: Rollout | None = None

    # --- from outside --------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Start no further target until `release`."""
        self._held = True
        self._apply()

    def release(self) -> None:
        """Go on."""
        self._held = False
        self._apply()

    def cancel(self, why: str = "the operation was cancelled before this target's turn") -> None:
        """Start no further target; those under way finish, and are not tried again."""
        self._cancel_why = why
        self._cancelled.set()
        self._apply()

    @property
    def held(self) -> bool:
        """Whether `hold` is in force."""
        return self._held

    async def quiet(self, timeout_s: float) -> bool:
        """Wait until no call is under way (hold first, or the next one begins); whether that was so in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._calling:
                    changed = self._moved
                    await changed.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> dict[str, fleet_pb2.TargetResult]:
        """Take every target to its result.

        When this task is cancelled, calls under way are cancelled too; their intents stay without a result, and
        whoever resumes asks for them.
        """
        apart = self._apart()
        rollout = Rollout(self._policy, [n for n in self._aims if n not in apart], _now(), self._progress())
        self._rollout = rollout
        self._apply()
        try:
            for name, was in self._recorded.items():
                if was.result is not None:
                    self.results[name] = was.result
                elif name in self._aims:
                    self._begin(name, was.wave, was.request_id)
            await self._loop(rollout)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.results

    # --- the rollout ---------------------------------------------------------------------------------------------

    async def _loop(self, rollout: Rollout) -> None:
        told = set(rollout.unhealthy)
        while True:
            self._changed.clear()
            decision = rollout.decide(_now())
            for name, why in rollout.unhealthy.items():
                if name not in told:
                    told.add(name)
                    self.warnings.append(f"{name}: {why}")
                    await self._on_record(self._journal.unhealthy(name, why))
            self._act(decision)
            self._show_health(rollout)
            if decision.drop:
                await asyncio.gather(*(self._dropped(drop, decision.wave) for drop in decision.drop))
            if decision.finished and not self._tasks:
                return
            await self._until_changed(decision.wake_at)

    def _show_health(self, rollout: Rollout) -> None:
        """Tell what a wave waits for: when it begins, when a target becomes healthy or ill, and now and then."""
        waits, now = rollout.waits(), _now()
        for name, healthy in waits.items():
            told, told_at = self._health_told.get(name, (not healthy, now))
            if told != healthy or now - told_at >= _TELL_HEALTH_EVERY_S:
                self._health_told[name] = healthy, now
                self._set_health(name, rollout.wait(name, now))
        for name in self._health_told.keys() - waits.keys():
            del self._health_told[name]
            self._set_health(name, rollout.unhealthy.get(name, ""))

    def _set_health(self, name: str, text: str) -> None:
        row = self.results[name]
        row.health = text
        self._notify(row, self._on_health)

    def _act(self, decision: Decision) -> None:
        for name in decision.start:
            self._begin(name, decision.wave, "")
        for name in decision.look:
            self._spawn(self._look(self._aims[name]))

    async def _until_changed(self, wake_at: float | None) -> None:
        try:
            async with asyncio.timeout_at(wake_at):
                await self._changed.wait()
        except TimeoutError:
            return

    def _begin(self, name: str, wave: int, recorded_request_id: str) -> None:
        self._calling.add(name)
        self._spawn(self._one(self._aims[name], wave, recorded_request_id))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("operation %s: a task raised", self.operation_id, exc_info=error)

    # --- one target ----------------------------------------------------------------------------------------------

    async def _one(self, aim: Aim, wave: int, recorded_request_id: str) -> None:
        deadline = _now() + max(self._timeout_s - self._spent_s.get(aim.name, 0.0), 0.0)
        retries = Retries(self._retry_policy, self._budget, deadline, wait=self.spec.wait)
        attempt = Attempt(
            self.operation_id,
            self.spec,
            aim,
            wave,
            self._replicas,
            self._journal,
            retries,
            given_up=self._cancelled,
        )
        self._notify(_row(aim, wave, fleet_pb2.TARGET_OUTCOME_RUNNING), self._on_change)
        try:
            result = await attempt.run(recorded_request_id)
        except JournalError as error:
            result = self._unrecorded(aim, wave, error)
        except Exception as error:  # noqa: BLE001 - a defect here must still give this target its result
            _log.exception("operation %s: %s", self.operation_id, aim.name)
            result = _row(aim, wave, fleet_pb2.TARGET_OUTCOME_UNKNOWN)
            result.code, result.reason = "INTERNAL", "SERVER_DEFECT"
            result.message = f"a defect here, the log has the trace: {type(error).__name__}: {error}"
        self.retries += retries.retries
        await self._end(result)
        self._calling.discard(aim.name)
        self._moved.set()
        self._moved = asyncio.Event()
        if self._rollout is None:
            return
        if _left_out(result):
            self._rollout.leave_out(aim.name)
            return
        succeeded = result.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
        self._rollout.finish(
            aim.name, succeeded=succeeded, now=_now(), why=result.message or result.reason or result.code
        )

    def _unrecorded(self, aim: Aim, wave: int, error: JournalError) -> fleet_pb2.TargetResult:
        """An intent could not be put on record: this target is not called, nor is any other after it."""
        if self._rollout is not None:
            self._rollout.stop(f"not called: the operation store failed: {error}")
        result = _row(aim, wave, fleet_pb2.TARGET_OUTCOME_SKIPPED)
        result.code, result.reason = "INTERNAL", "STORE_FAILED"
        result.message = f"not called, because its intent could not be put on record: {error}"
        return result

    async def _dropped(self, drop: Drop, wave: int) -> None:
        cancelled = drop.ending is Ending.CANCELLED
        outcome = fleet_pb2.TARGET_OUTCOME_CANCELLED if cancelled else fleet_pb2.TARGET_OUTCOME_SKIPPED
        result = _row(self._aims[drop.target], wave, outcome)
        result.code = "CANCELLED"
        result.reason = "CANCELLED" if cancelled else "ROLLOUT_STOPPED"
        result.message = drop.why
        await self._end(result)

    async def _end(self, result: fleet_pb2.TargetResult) -> None:
        """Record first, then tell: nobody may have seen a result that a crash forgets."""
        await self._on_record(self._journal.result(result))
        self.results[result.replica] = result
        self._notify(result, self._on_change)

    def _notify(self, result: fleet_pb2.TargetResult, listener: OnChange) -> None:
        """Whoever listens cannot keep a target from its result."""
        try:
            listener(result)
        except Exception:  # noqa: BLE001 - logged; the target's result matters more than who hears of it
            _log.exception("operation %s: a listener raised", self.operation_id)

    async def _on_record(self, write: Coroutine[None, None, None]) -> None:
        """A result that cannot be recorded is still a result; after a crash it is asked for again."""
        try:
            await write
        except JournalError as error:
            warning = f"the operation store failed, results are kept in memory only: {error}"
            if warning not in self.warnings:
                self.warnings.append(warning)

    async def _look(self, aim: Aim) -> None:
        try:
            health = await self._replicas.health(aim, self.spec, _LOOK_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a defect here must not leave the rollout waiting for this look
            _log.exception("operation %s: the health of %s", self.operation_id, aim.name)
            health = Health(False, f"a defect here, the log has the trace: {type(error).__name__}: {error}")
        if self._rollout is not None:
            self._rollout.observe(aim.name, healthy=health.healthy, now=_now(), why=health.why)

    # --- inside --------------------------------------------------------------------------------------------------

    def _apply(self) -> None:
        """Carry hold, release and cancel, which may come before the run begins, over to the rollout."""
        if self._rollout is not None:
            if self._held:
                self._rollout.hold()
            else:
                self._rollout.release()
            if self._cancel_why:
                self._rollout.cancel(self._cancel_why)
        self._changed.set()

    def _apart(self) -> set[str]:
        """Targets that have a recorded end and were never started: they count neither way in the rollout."""
        ends = ((name, was.request_id, was.result) for name, was in self._recorded.items())
        return {
            name
            for name, request_id, end in ends
            if end is not None and ((end.outcome in outcomes.NOT_CALLED and not request_id) or _left_out(end))
        }

    def _progress(self) -> dict[str, Progress]:
        progress = {}
        apart = self._apart()
        for name, was in self._recorded.items():
            if name in self._aims and name not in apart:
                succeeded = was.result and was.result.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
                progress[name] = Progress(was.wave, None if was.result is None else bool(succeeded), was.unhealthy)
        return progress


def _left_out(result: fleet_pb2.TargetResult) -> bool:
    """Whether it was not called because it is no target of its own (any more): neither a success nor a failure."""
    return result.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED and result.reason in _NO_TARGET


def _row(aim: Aim, wave: int, outcome: fleet_pb2.TargetOutcome.ValueType) -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(
        replica=aim.name, address=aim.address, outcome=outcome, wave=wave, labels=dict(aim.labels)
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
