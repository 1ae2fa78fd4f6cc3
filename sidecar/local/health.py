"""Whether the parts of a local fleet run and serve."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Final

from sidecar.local.layout import Replica
from sidecar.local.processes import alive, members

SILENT: Final = "not answering"
"""An engine whose process runs: it may be ending, or hang, or be on a machine that is too busy."""

_ENGINE_SECONDS: Final = 10.0


def answers(address: str, path: str) -> bool:
    """Whether GET gives 200 within a second."""
    return _get(address, path, 1.0) == 200


def engine_state(replica: Replica, directory: Path) -> str:
    """One of: serving, dead (and what is left of it), not answering, unhealthy (HTTP 503)."""
    if replica.engine is None or not alive(replica.engine):
        left = len(members([replica.engine], directory)) if replica.engine else 0
        return f"dead, {left} processes left" if left else "dead"
    code = _get(replica.api, "/health", _ENGINE_SECONDS)
    if code is None:
        return SILENT
    return "serving" if code == 200 else f"unhealthy (HTTP {code})"


def is_lost(state: str) -> bool:
    """Whether a state of an engine is one that it does not come back from."""
    return state.startswith(("dead", "unhealthy"))


def sidecar_lost(replica: Replica) -> bool:
    """Whether the sidecar's process is gone."""
    return replica.sidecar_process is None or not alive(replica.sidecar_process)


def serves(replica: Replica) -> bool:
    """Whether the engine takes requests and the sidecar has found it."""
    return answers(replica.api, "/health") and answers(replica.metrics, "/readyz")


def _get(address: str, path: str, timeout_s: float) -> int | None:
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
