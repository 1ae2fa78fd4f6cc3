"""What the audit log of a sidecar holds of each kind of mutation."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.replica.service import ACCESS
from sidecar.rpc.auth import Role
from tests.contract.sidecar_process import SidecarProcess
from tests.fake_engine.process import spawn_engine

BOTH = {"time", "audit", "replica", "operation", "request_id", "caller", "role", "peer"}
LAST = {"code": str, "reason": str, "message": str, "took_ms": float}
PAUSE, REFUSED = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
METHODS = {
    "reset": "ResetPrefixCache",
    "reorder": "ReorderFreeQueue",
    "relieve": "RelieveAdmission",
    "pause": "PauseScheduling",
    "renew": "RenewPause",
    "cancel": "CancelOperation",
    "resume": "ResumeScheduling",
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, object]]]:
    """Each mutation once, with success, and one that is refused."""
    root: Path = tmp_path_factory.mktemp("audit")
    engine_dir = root / "engines"
    engine_dir.mkdir(mode=0o700)
    with spawn_engine(engine_dir) as engine:
        sidecar = SidecarProcess(engine_dir, root)
        try:
            sidecar.wait_ready()
            with sidecar.stub() as stub:
                stub.ResetPrefixCache(api.ResetPrefixCacheRequest(running_requests=types.RUNNING_REQUESTS_KEEP))
                stub.ReorderFreeQueue(api.ReorderFreeQueueRequest())
                stub.PauseScheduling(api.PauseSchedulingRequest(request_id=PAUSE, lease={"seconds": 60}))
                stub.RenewPause(api.RenewPauseRequest(pause_request_id=PAUSE, lease={"seconds": 60}))
                stub.ResumeScheduling(api.ResumeSchedulingRequest(pause_request_id=PAUSE))
                stub.CancelOperation(api.CancelOperationRequest(request_id=PAUSE))
                with contextlib.suppress(grpc.RpcError):
                    stub.RelieveAdmission(api.RelieveAdmissionRequest())
                engine.do("hold")
                with contextlib.suppress(grpc.RpcError):
                    stub.ResetPrefixCache(api.ResetPrefixCacheRequest(request_id=REFUSED))
                engine.do("release")
            yield sidecar.audit()
        finally:
            sidecar.end()


def test_every_method_that_changes_something_is_in_the_table():
    changing = {method.rpartition("/")[2] for method, role in ACCESS.items() if role > Role.VIEWER}
    assert set(METHODS.values()) == changing


@pytest.mark.parametrize("operation", METHODS)
def test_every_mutation_has_a_line_before_and_one_after_with_the_same_fields(lines, operation):
    first, last = [line for line in lines if line["operation"] == operation][:2]
    assert (first["audit"], last["audit"]) == ("begin", "end")
    assert {name: first[name] for name in BOTH - {"audit", "time"}} == {
        name: last[name] for name in BOTH - {"audit", "time"}
    }
    assert first["engines"] == [0]
    assert {name: type(last[name]) for name in LAST} == LAST
    assert last["took_ms"] > 0
    assert set(last) - BOTH - set(LAST) == ({"cancelled"} if operation == "cancel" else set())


def test_the_last_line_of_a_refusal_says_why(lines):
    _, last = [line for line in lines if line["request_id"] == REFUSED]
    assert (last["code"], last["reason"]) == ("FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS")
    assert "blocks" in last["message"]


def test_the_last_line_of_a_withdrawal_that_came_too_late_says_so(lines):
    last = [line for line in lines if line["operation"] == "cancel"][-1]
    assert (last["code"], last["cancelled"]) == ("OK", False)
    assert last["message"]
