"""The API's words for what a person asked."""

from __future__ import annotations

from typing import Final

from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

MODES: Final = {
    "fail": types_pb2.RUNNING_REQUESTS_FAIL,
    "preempt": types_pb2.RUNNING_REQUESTS_PREEMPT,
    "keep": types_pb2.RUNNING_REQUESTS_KEEP,
}
SCOPES: Final = {
    "idle": types_pb2.REORDER_SCOPE_IDLE,
    "uncached": types_pb2.REORDER_SCOPE_UNCACHED,
    "all-free": types_pb2.REORDER_SCOPE_ALL_FREE,
}
PURPOSES: Final = {
    None: types_pb2.PURPOSE_UNSPECIFIED,
    "benchmark": types_pb2.PURPOSE_BENCHMARK,
    "weight-update": types_pb2.PURPOSE_WEIGHT_UPDATE,
}


def reset_spec(
    mode: str,
    *,
    connector: bool,
    mm: bool,
    encoder: bool,
    reorder: bool,
    wait_for_idle: bool,
    quarantine: bool,
    purpose: str | None,
) -> fleet_pb2.OperationSpec:
    """A reset."""
    request = replica_pb2.ResetPrefixCacheRequest(
        running_requests=MODES[mode],
        reset_connector=connector,
        reset_mm_cache=mm,
        reset_encoder_cache=encoder,
        reorder_free_queue=reorder,
        wait_for_idle=wait_for_idle,
        quarantine_running=quarantine,
        purpose=PURPOSES[purpose],
    )
    return fleet_pb2.OperationSpec(reset=request)


def reorder_spec(scope: str) -> fleet_pb2.OperationSpec:
    """A reorder."""
    return fleet_pb2.OperationSpec(reorder=replica_pb2.ReorderFreeQueueRequest(scope=SCOPES[scope]))
