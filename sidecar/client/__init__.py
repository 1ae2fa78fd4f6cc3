"""The public Python library: fleets of replicas from blocking code (`Fleet`) and from asyncio (`aio.Fleet`).

    from sidecar.client import Fleet

    with Fleet(inventory="fleet.yaml") as fleet:
        result = fleet.reset_prefix_cache(running_requests="keep", quarantine_running=True)
        result.raise_for_failures()

What goes wrong is one of the exceptions in `errors`, whose docstring draws their tree; what each replica, engine and
tier did is in `results`; `weights` says what a weight update promises when somebody dies in the middle.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.client.blocking import Fleet, WeightUpdate
    from sidecar.client.errors import FleetFailed, KvctlError
    from sidecar.client.results import FleetResult, ReplicaResult

__all__ = ["Fleet", "FleetFailed", "FleetResult", "KvctlError", "ReplicaResult", "WeightUpdate"]

_HOMES = {
    "Fleet": "blocking",
    "WeightUpdate": "blocking",
    "FleetFailed": "errors",
    "KvctlError": "errors",
    "FleetResult": "results",
    "ReplicaResult": "results",
}


def __getattr__(name: str) -> object:
    """Import on first use: kvctl imports parts of this package and must start at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
