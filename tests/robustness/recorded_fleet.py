"""A fleet whose every operation goes into a history: real sidecars and a real coordinator over fake engines.

    with recorded_fleet(folder) as fleet:
        fleet.new_run(floor=2)
        fleet.load(2)                       # operations that must succeed before the first fault
        doomed = fleet.start(...)
        fleet.replicas["r0"].kill_sidecar()
        ...
        fleet.end(doomed)
        fleet.check()                       # every promise, over everything since new_run

Between the coordinator and each sidecar is a proxy (`tcp_proxy`), which also keeps the address while a sidecar is away.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.client.blocking import Fleet
from sidecar.coordinator.targets import derive_request_id
from sidecar.rpc import errors
from sidecar.rpc.channels import NO_SECURITY, ClientSecurity
from tests.contract.sidecar_process import ROOT, wait_until
from tests.robustness import history
from tests.robustness.checker import latest_start, violations
from tests.robustness.history import AnyEvent, Called, Fault, Floor, Row, Tape, Told, now_ns
from tests.robustness.recorded_processes import CoordinatorUnderTest, ReplicaUnderTest
from tests.robustness.tcp_proxy import Network

ENDED = (4, 5, 6, 7)
LONG_S = 60.0
"""For what must come: as long as it takes on a busy machine."""
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
KEPT = ROOT / "build" / "robustness"


class RecordedFleet:
    """See the module. Use `recorded_fleet`."""

    def __init__(self, folder: Path, replicas: int, security: ClientSecurity) -> None:
        self.folder = folder
        self.tape = Tape(folder / "callers.jsonl")
        self.network = Network()
        self.replicas: dict[str, ReplicaUnderTest] = {}
        self.refusal: errors.Failure | None = None
        """How the last `start` was refused."""
        self._from_ns = 0
        self._incarnations: dict[tuple[str, str], str] = {}
        self._seen: dict[str, int] = {}
        """Operation -> version of the account that was put on record last."""
        self._seen_again: dict[str, Told] = {}
        """Operation -> that account as it was seen last, which is on record once there is another."""
        for index in range(replicas):
            name = f"r{index}"
            self.replicas[name] = ReplicaUnderTest(folder, name, self.network, self.fault, security)
        targets = [f"{name}={replica.proxy.address}" for name, replica in self.replicas.items()]
        self.coordinator = CoordinatorUnderTest(folder, targets, self.fault)

    def start_all(self, sidecar_arguments: Sequence[str], coordinator_arguments: Sequence[str]) -> None:
        """Every process, once. `close` ends those that have started."""
        for replica in self.replicas.values():
            replica.start_engine()
        for replica in self.replicas.values():
            replica.start_sidecar(*sidecar_arguments)
        self.coordinator.start(*coordinator_arguments)

    # --- the history ---------------------------------------------------------------------------------------------

    def new_run(self, floor: int) -> None:
        """What follows is a history of its own: `floor` operations must have succeeded before its first fault."""
        self._from_ns = now_ns()
        self.tape.write(Floor(at_ns=now_ns(), operations=floor))

    def fault(self, what: str, whom: str) -> None:
        """Put a fault on record, before it is done; what mends one, after."""
        self.tape.write(Fault(at_ns=now_ns(), what=what, whom=whom))

    def events(self) -> list[AnyEvent]:
        """Everything since `new_run`."""
        files = [self.tape.file, *(replica.tape_file for replica in self.replicas.values())]
        return [event for event in history.read(files) if event.at_ns >= self._from_ns]

    def latest_start(self, operation_id: str, replica: str) -> int:
        """When no engine may take this target up any more."""
        instant = latest_start(self.events(), operation_id, replica)
        assert instant is not None, "this target has not been seen under way"
        return instant

    def check(self) -> None:
        """AssertionError with every promise that was broken; the history is kept then."""
        events = self.events()
        found = violations(events)
        if not found:
            return
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = Tape(KEPT / f"history-{uuid.uuid4().hex[:8]}.jsonl")
        for event in events:
            kept.write(event)
        told = "\n".join(str(violation) for violation in found)
        raise AssertionError(f"{told}\nhistory: {kept.file}\n{self.coordinator.log()[-3000:]}")

    # --- operations ----------------------------------------------------------------------------------------------

    def start(self, timeout_s: int = 60, *, max_unavailable: int = 0, max_failures: int = 0) -> str:
        """Start a reset of every replica (rolling with `max_unavailable`); its id. Asked again under that id until the
        coordinator says that it is on record. Refused with the error in `refusal`, nothing must ever happen.
        """
        operation_id = str(uuid.uuid4())
        spec = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True))
        spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
        spec.timeout.seconds = timeout_s
        if max_unavailable:
            spec.rollout.strategy = fleet_pb2.ROLLOUT_STRATEGY_ROLLING
            spec.rollout.max_unavailable = str(max_unavailable)
            spec.rollout.max_failures = max_failures or len(self.replicas)
        self._call(operation_id, timeout_s, max_unavailable)
        request = fleet_pb2.StartOperationRequest(operation_id=operation_id, spec=spec)
        self.refusal = None
        self._until_answered(lambda: self.coordinator.stub.StartOperation(request, timeout=10))
        if self.refusal is not None:
            rows = [Row(name, "skipped", self.refusal.code.name, self.refusal.reason) for name in self.replicas]
            self.tape.write(Told(at_ns=now_ns(), operation_id=operation_id, rows=rows, final=True))
        return operation_id

    def run_directly(self, timeout_s: int, operation_id: str = "") -> fleet_pb2.FleetOperation:
        """What kvctl does without a coordinator: reset every replica from here. With an id: that one again."""
        if not operation_id:
            operation_id = str(uuid.uuid4())
            self._call(operation_id, timeout_s, 0)
        addresses = [f"{name}={replica.proxy.address}" for name, replica in self.replicas.items()]
        with Fleet(addresses) as client:
            done = client.reset_prefix_cache(
                running_requests="keep", timeout_s=timeout_s, operation_id=operation_id
            ).message
        self.tape.write(
            Told(at_ns=now_ns(), operation_id=operation_id, rows=[_row(row) for row in done.results], final=True)
        )
        return done

    def _call(self, operation_id: str, timeout_s: float, max_unavailable: int) -> None:
        """Put on record that this operation is about to be asked for."""
        for name, replica in self.replicas.items():
            self._incarnations[operation_id, name] = replica.engine.incarnation
        self.tape.write(
            Called(
                at_ns=now_ns(),
                operation_id=operation_id,
                targets=list(self.replicas),
                request_ids={derive_request_id(operation_id, name): name for name in self.replicas},
                timeout_s=timeout_s,
                max_unavailable=max_unavailable,
            )
        )

    def cancel(self, operation_id: str) -> None:
        """Start nothing more of it, and try nothing again."""
        request = fleet_pb2.FleetAdminCancelOperationRequest(operation_id=operation_id)
        self.coordinator.stub.CancelOperation(request, timeout=LONG_S)

    def look(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """The operation as the coordinator now tells it; each account is put on record as first and as last seen."""
        request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=operation_id)
        asked_ns = now_ns()
        found: fleet_pb2.FleetOperation = self.coordinator.stub.GetOperation(request, timeout=10).operation
        told = Told(
            at_ns=now_ns(),
            operation_id=operation_id,
            rows=[_row(row) for row in found.results],
            final=found.state in ENDED,
            asked_ns=asked_ns,
        )
        if self._seen.get(operation_id) != found.version:
            self._seen[operation_id] = found.version
            if (before := self._seen_again.pop(operation_id, None)) is not None:
                self.tape.write(before)
            self.tape.write(told)
        else:
            self._seen_again[operation_id] = told
        return found

    def end(self, operation_id: str, within_s: float = LONG_S) -> fleet_pb2.FleetOperation:
        """The operation once it has ended, looked at all the while."""
        found: list[fleet_pb2.FleetOperation] = []

        def look() -> bool:
            with suppress_passing():
                found[:] = [self.look(operation_id)]
            return bool(found) and found[0].state in ENDED

        wait_until(look, within_s, lambda: f"{found}\n{self.coordinator.log()[-3000:]}")
        return found[0]

    def run(self, timeout_s: int = 60, *, max_unavailable: int = 0) -> fleet_pb2.FleetOperation:
        """Start and end."""
        operation_id = self.start(timeout_s, max_unavailable=max_unavailable)
        assert self.refusal is None, f"refused: {self.refusal}"
        return self.end(operation_id)

    def load(self, operations: int) -> None:
        """So many operations, each of which succeeds."""
        self.wait_reached()
        for _ in range(operations):
            ended = self.run()
            assert ended.state == fleet_pb2.OPERATION_STATE_SUCCEEDED, f"{ended}\n{self.coordinator.log()[-3000:]}"

    def wait_reached(self) -> None:
        """Until the coordinator reaches every replica: after a failure a channel waits before it tries again."""

        def reached() -> bool:
            with suppress_passing():
                found = self.coordinator.stub.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=LONG_S)
                return all(replica.reachable for replica in found.replicas)
            return False

        wait_until(reached, LONG_S, lambda: self.coordinator.log()[-3000:])

    def settle(self, operation_id: str) -> list[Row]:
        """Ask each replica, which must be well now, for what is unknown about an ended operation; on record too."""
        rows = []
        for row in self.look(operation_id).results:
            known = row
            if row.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN:
                known = self.replicas[row.replica].ask(row, self._incarnations[operation_id, row.replica])
            rows.append(_row(known))
        self.tape.write(Told(at_ns=now_ns(), operation_id=operation_id, rows=rows, final=True))
        return rows

    # --- the end -------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Whatever is broken now works again: networks, then what was stopped or killed."""
        for replica in self.replicas.values():
            replica.mend()
        self.coordinator.mend()
        self.wait_reached()

    def close(self) -> None:
        self.coordinator.end()
        for replica in self.replicas.values():
            replica.end()
        self.network.close()

    def _until_answered(self, ask: Callable[[], object]) -> None:
        def answered() -> bool:
            with suppress_passing():
                try:
                    ask()
                except grpc.RpcError as error:
                    if error.code() in _PASSING:
                        raise
                    self.refusal = errors.parse(error)
                return True
            return False

        wait_until(answered, LONG_S, lambda: self.coordinator.log()[-3000:])


@contextmanager
def suppress_passing() -> Iterator[None]:
    """The coordinator is away or busy: whoever asks will ask again."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() not in _PASSING:
            raise AssertionError(f"the coordinator answered: {errors.parse(error)}") from error


@contextmanager
def recorded_fleet(
    replicas: int = 2,
    *,
    sidecar_arguments: Sequence[str] = (),
    coordinator_arguments: Sequence[str] = (),
    security: ClientSecurity = NO_SECURITY,
) -> Iterator[RecordedFleet]:
    """A fleet in a folder of its own with a short name: paths of Unix sockets have 107 bytes.

    `security` is how a test that calls a sidecar by itself is let in.
    """
    with tempfile.TemporaryDirectory(prefix="kvctl-", ignore_cleanup_errors=True) as folder:
        fleet = RecordedFleet(Path(folder), replicas, security)
        try:
            fleet.start_all(sidecar_arguments, coordinator_arguments)
            yield fleet
        finally:
            fleet.close()


def _row(row: fleet_pb2.TargetResult) -> Row:
    outcome = fleet_pb2.TargetOutcome.Name(row.outcome).removeprefix("TARGET_OUTCOME_").lower()
    execution = types_pb2.Execution.Name(row.execution).removeprefix("EXECUTION_").lower()
    return Row(
        row.replica,
        "" if outcome == "unspecified" else outcome,
        row.code,
        row.reason,
        row.request_id,
        "" if execution == "unspecified" else execution,
        row.health,
    )
