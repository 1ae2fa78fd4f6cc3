"""What to do next, by reason: the half of an error message that the replica cannot know, being no command line."""

from __future__ import annotations

from typing import Final

from kvctl.v1 import types_pb2

NEXT: Final = {
    "BLOCKS_HELD_BY_REQUESTS": "use --mode keep (interrupts nobody), --wait-for-idle, or --mode preempt",
    "BLOCKS_HELD_BY_TRANSFERS": "transfers end by themselves: try again with --wait, or use --mode keep",
    "REMOTE_LOADS_IN_FLIGHT": "try again with --wait once the loads are done, or use --mode keep",
    "HELD_WHILE_PAUSED": "use --mode preempt or keep, or resume first: `kvctl scheduling resume`",
    "OTHER_INSTANCE": "that sidecar was restarted meanwhile; nothing was done there: run it again",
    "CONNECTOR_BUSY": "the connector is still moving data: try again with --wait",
    "NOT_DEADLOCKED": "nothing to relieve; `kvctl admission` shows the verdict",
    "RELIEF_EXHAUSTED": "relief did not help: look at `kvctl admission -o wide`",
    "ENGINE_SLEEPING": "wake the engine first",
    "OPERATION_IN_PROGRESS": "try again with --wait, or follow the other operation by its id",
    "REQUEST_ID_REUSED": "leave --request-id out, or give a new one",
    "NEEDS_ENGINE_BRIDGE": "install kvctl in the engine's environment and restart it; see `kvctl doctor`",
    "NEEDS_DEV_MODE": "only the engine bridge does this without vLLM's dev mode; see `kvctl doctor`",
    "ENGINE_LACKS_CAPABILITY": "`kvctl replicas -o wide` lists what each engine can do",
    "TIER_UNSUPPORTED": "leave that tier out, or restart the engine to clear it",
    "NO_ENGINE": "start the engine with the bridge installed; see `kvctl doctor`",
    "ENGINE_STARTING": "try again with --wait",
    "ENGINE_DEAD": "restart the engine: its cache is empty then",
    "ENGINE_RESTARTED": "the new engine's cache is empty: nothing more to reset",
    "BRIDGE_NOT_ATTACHED": "see `kvctl doctor`",
    "REPLICA_UNREACHABLE": "check that the sidecar runs and listens there; see `kvctl doctor`",
    "NOT_A_SIDECAR": "name sidecars, one address a replica",
    "OUTCOME_UNKNOWN": "repeat it with --request-id {operation_id}",
    "UNCONFIRMED": "vLLM does not say over HTTP what came of it: run it again, or install the engine bridge",
    "NOT_EXECUTED": "nothing happened there: try again with a longer --timeout",
    "NEVER_IDLE": "no idle moment came: a longer --timeout, or --mode keep",
    "BAD_CREDENTIALS": "check --token-file, or --cert and --key",
    "ROLE_TOO_SMALL": "ask for a credential with the role that the message names",
    "TOO_MANY_OPERATIONS": "try again later, or with --wait",
    "ROLLOUT_STOPPED": "mend the failed replicas, then run it for the rest",
}
"""Reason -> one line. `{operation_id}` is filled in."""

_NEXT_OF_RESUME: Final = {
    "WRONG_SCHEDULING_STATE": "wait for its end, end it with --pause and the id shown (or its operation's), or --force",
}
"""Where a resume is refused because somebody else holds the pause."""

_NEXT_OF_REORDER: Final = {
    "BLOCKS_HELD_BY_REQUESTS": "use --scope uncached or --scope all-free: both work while requests run",
    "BLOCKS_HELD_BY_TRANSFERS": "try again with --wait, or use --scope uncached or all-free",
    "HELD_WHILE_PAUSED": "use --scope uncached or all-free, or resume first: `kvctl scheduling resume`",
}
"""Where a reorder's way out is another than a reset's."""


_NEXT_OF_KIND: Final = {
    types_pb2.OPERATION_KIND_REORDER: _NEXT_OF_REORDER,
    types_pb2.OPERATION_KIND_RESUME: _NEXT_OF_RESUME,
}


_NEXT_AT_COORDINATOR: Final = {
    "OUTCOME_UNKNOWN": "the coordinator goes on asking for an hour: `kvctl ops get {operation_id}`",
}
"""Where an id stands for the operation on record: to repeat it would run nothing."""


def advise(
    reason: str,
    operation_id: str = "",
    kind: types_pb2.OperationKind.ValueType | None = None,
    *,
    at_coordinator: bool = False,
) -> str:
    """What to do about a reason of an operation of this kind; empty when there is nothing to add."""
    if at_coordinator and reason in _NEXT_AT_COORDINATOR:
        return _NEXT_AT_COORDINATOR[reason].replace("{operation_id}", operation_id)
    special = _NEXT_OF_KIND.get(kind, {}) if kind is not None else {}
    return special.get(reason, NEXT.get(reason, "")).replace("{operation_id}", operation_id)
