"""From the API's requests to the engine's messages: every option that a caller can set reaches the engine.

An option dropped on the way is the quiet kind of wrong (sglang#36150), so a test walks all fields of every request and
fails when one of them changes nothing here. `UNSPECIFIED` becomes the least disruptive choice, in one place.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final, Literal

from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.replica import rules

Kind = Literal["reset", "reorder", "relieve", "pause", "resume"]

MutatingRequest = (
    api.ResetPrefixCacheRequest
    | api.ReorderFreeQueueRequest
    | api.RelieveAdmissionRequest
    | api.PauseSchedulingRequest
    | api.ResumeSchedulingRequest
)

RUNNING: Final[dict[int, protocol.RunningMode]] = {
    types.RUNNING_REQUESTS_UNSPECIFIED: "fail",
    types.RUNNING_REQUESTS_FAIL: "fail",
    types.RUNNING_REQUESTS_PREEMPT: "preempt",
    types.RUNNING_REQUESTS_KEEP: "keep",
}
SCOPES: Final[dict[int, protocol.Scope]] = {
    types.REORDER_SCOPE_UNSPECIFIED: "idle",
    types.REORDER_SCOPE_IDLE: "idle",
    types.REORDER_SCOPE_UNCACHED: "uncached",
    types.REORDER_SCOPE_ALL_FREE: "all_free",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One mutation as asked for."""

    kind: Kind
    mode: str
    """For metrics and the audit log: "fail", "preempt", "keep", a scope, or empty."""
    mutation: protocol.Mutation
    """With call and deadline 0; its request id is canonical."""
    validate_only: bool = False

    @property
    def request_id(self) -> str:
        """The request id in force."""
        return self.mutation.request_id


def canonical_id(request_id: str) -> str:
    """The one spelling of a UUID; a new one when empty. Checked by `rules` before."""
    return str(uuid.UUID(request_id)) if request_id else str(uuid.uuid4())


def read(request: MutatingRequest) -> Wanted:
    """What a request asks for. Failure INVALID_ARGUMENT when a rule is broken."""
    rules.check(request)
    request_id = canonical_id(request.request_id)
    match request:
        case api.ResetPrefixCacheRequest():
            mode = RUNNING[request.running_requests]
            reset = protocol.Reset(
                call=0,
                request_id=request_id,
                deadline_ns=0,
                running=mode,
                connector=request.reset_connector,
                mm=request.reset_mm_cache,
                encoder=request.reset_encoder_cache,
                reorder=request.reorder_free_queue,
                wait_for_idle=request.wait_for_idle,
                quarantine=request.quarantine_running,
            )
            return Wanted("reset", mode, reset, request.validate_only)
        case api.ReorderFreeQueueRequest():
            scope = SCOPES[request.scope]
            return Wanted("reorder", scope, protocol.Reorder(0, request_id, 0, scope), request.validate_only)
        case api.RelieveAdmissionRequest():
            return Wanted("relieve", "", protocol.Relieve(0, request_id, 0), request.validate_only)
        case api.PauseSchedulingRequest():
            resume = request.on_abandon == api.ABANDON_POLICY_RESUME
            lease_ns = int(rules.seconds(request.lease) * 1e9)
            return Wanted("pause", "", protocol.Pause(0, request_id, 0, lease_ns, resume))
        case api.ResumeSchedulingRequest():
            pause_id = canonical_id(request.pause_request_id) if request.pause_request_id else ""
            return Wanted(
                "resume", "", protocol.Resume(0, request_id, 0, pause_id, request.weight_version, request.force)
            )


def capabilities_needed(mutation: protocol.Mutation) -> list[str]:
    """Names of protocol.CAPABILITIES without which the engine would refuse."""
    match mutation:
        case protocol.Reset():
            wanted = [
                ("reset.wait_for_idle", mutation.wait_for_idle),
                ("reset.quarantine", mutation.quarantine),
                ("reset.connector", mutation.connector),
                ("reset.mm", mutation.mm),
                ("reset.encoder", mutation.encoder),
                ("reorder.all_free", mutation.reorder),
            ]
            return [f"reset.{mutation.running}", *(name for name, on in wanted if on)]
        case protocol.Reorder():
            return [f"reorder.{mutation.scope}"]
        case protocol.Relieve():
            return ["relieve"]
        case _:
            return ["pause"]
