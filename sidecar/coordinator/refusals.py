"""Why the coordinator refuses a request, as errors of the contract.

What can be known before a single replica is called is said at once and for the whole request, with the field that is
wrong; a thousand rows with the same refusal help nobody.
"""

from __future__ import annotations

from typing import Final

import grpc
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import calls
from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.rollout import Policy, PolicyError
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.selectors import SelectorError, read_targets
from sidecar.rpc.errors import Failure, Violation, failure

LONGEST_TIMEOUT_S: Final = 3600.0


def invalid(field: str, text: str, reason: str = "INVALID_FIELD") -> Failure:
    """INVALID_ARGUMENT for one field."""
    return failure(grpc.StatusCode.INVALID_ARGUMENT, reason, text, violations=[Violation(field, text)])


def check_spec(spec: fleet_pb2.OperationSpec) -> None:
    """Failure when a request makes no sense whatever the fleet looks like."""
    if spec.WhichOneof("operation") is None:
        raise invalid("spec", "the spec names no operation; set one of " + ", ".join(calls.KINDS))
    timeout_s = calls.seconds(spec.timeout)
    if not 0.0 <= timeout_s <= LONGEST_TIMEOUT_S:
        text = f"timeout is {timeout_s:g} s; expected 0 (30 s) to {LONGEST_TIMEOUT_S:g} s"
        raise invalid("spec.timeout", text)
    if not (spec.targets.all or spec.targets.names or spec.targets.selector):
        raise invalid("spec.targets", "no targets; set exactly one of all, names and selector")
    try:
        read_targets(spec.targets)
        Policy.resolve(spec.rollout, 1)
    except (SelectorError, PolicyError) as error:
        raise as_failure(error) from error
    if spec.WhichOneof("operation") == "reset":
        _check_reset(spec)


def _check_reset(spec: fleet_pb2.OperationSpec) -> None:
    """The combinations that the contract rules out; the sidecars check them again."""
    reset = spec.reset
    keep = reset.running_requests == types_pb2.RUNNING_REQUESTS_KEEP
    if keep and reset.purpose == types_pb2.PURPOSE_WEIGHT_UPDATE and not reset.quarantine_running:
        raise invalid(
            "spec.reset.quarantine_running",
            "KEEP for a weight update needs quarantine_running: blocks that kept requests fill with the old weights "
            "would enter the cache",
            "INVALID_COMBINATION",
        )
    if reset.quarantine_running and not keep:
        text = "quarantine_running needs running_requests KEEP: no other mode keeps a request"
        raise invalid("spec.reset.quarantine_running", text, "INVALID_COMBINATION")
    fail = reset.running_requests in (types_pb2.RUNNING_REQUESTS_UNSPECIFIED, types_pb2.RUNNING_REQUESTS_FAIL)
    if reset.wait_for_idle and not fail:
        text = "wait_for_idle needs running_requests FAIL: the other modes need no idle moment"
        raise invalid("spec.reset.wait_for_idle", text, "INVALID_COMBINATION")


def as_failure(error: Exception) -> Exception:
    """The error of the contract that says what another one means; anything unknown is returned as it is."""
    match error:
        case SelectorError():
            return invalid("spec.targets", str(error), "INVALID_SELECTOR")
        case PolicyError():
            reason = "INVALID_COMBINATION" if error.combination else "INVALID_FIELD"
            return invalid(f"spec.rollout.{error.field}", str(error), reason)
        case DiscoveryError():
            return failure(grpc.StatusCode.UNAVAILABLE, "DISCOVERY_FAILED", str(error), retry_after=5.0)
        case StoreError():
            return failure(grpc.StatusCode.INTERNAL, "STORE_FAILED", str(error))
        case _:
            return error
